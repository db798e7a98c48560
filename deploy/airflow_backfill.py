"""Two Airflow DAGs for the nightly backfill: on an Airflow worker itself, and on Dataflow from the Flex Template. Keep one.

Put this file into the folder of DAGs and set the Airflow variables `detect_bucket` (gs://BUCKET) and, for Dataflow,
`detect_project`, `detect_image` and `detect_service_account`; see `terraform output` in deploy/terraform. The first DAG needs
this project in an environment on the workers, `/opt/detect`, and the provider packages apache-beam and google; the second one
the provider google alone.

Each run is for the seven days before it, also one that Airflow runs again or for the past (`airflow backfill create`): what has a
row already is not done again, so the next runs make up for one that was missed or failed. A run of the same days as one that is
at work skips; what exits with 1, 2 or 3 fails, is retried, and can be alarmed on (`on_failure_callback`).
"""

from __future__ import annotations

import datetime

from airflow.providers.apache.beam.operators.beam import BeamRunPythonPipelineOperator
from airflow.providers.google.cloud.operators.dataflow import DataflowStartFlexTemplateOperator
from airflow.sdk import DAG, CronTriggerTimetable

BUCKET = "{{ var.value.detect_bucket }}"
THE_DAYS_BEFORE = "{{ macros.ds_add(ds, -7) }}..{{ macros.ds_add(ds, -1) }}"
REGION = "europe-west1"
SCRATCH = f"{BUCKET}/tmp"  # noqa: S108  a bucket's
NETWORK, SUBNETWORK = "", ""  # of the workers; empty: the default network

NIGHTLY = {
    "schedule": CronTriggerTimetable("0 3 * * *", timezone="UTC"),
    "start_date": datetime.datetime(2026, 11, 1, tzinfo=datetime.timezone.utc),
    "catchup": False,
    "max_active_runs": 1,
    "default_args": {"retries": 2, "retry_delay": datetime.timedelta(minutes=10)},
    "tags": ["detection"],
}

with DAG("detect_backfill", description="The last week's images that have no row yet, on this worker", **NIGHTLY):
    BeamRunPythonPipelineOperator(
        task_id="backfill",
        py_interpreter="/opt/detect/bin/python",
        py_options=["-m"],
        py_file="pipeline.run",
        runner="DirectRunner",
        pipeline_options={
            "config": "backfill_gcs_direct",
            "input": f"{BUCKET}/images/{{date:%Y/%m/%d}}/**",
            "dates": THE_DAYS_BEFORE,
            "output": f"{BUCKET}/results",
            "model": f"{BUCKET}/models/yolov4",
        },
    )

with DAG("detect_backfill_dataflow", description="The last week's images that have no row yet, on Dataflow", **NIGHTLY):
    DataflowStartFlexTemplateOperator(
        task_id="backfill",
        project_id="{{ var.value.detect_project }}",
        location=REGION,
        append_job_name=False,  # Dataflow refuses a second job of this name while the first one runs
        deferrable=True,
        body={
            "launchParameter": {
                "jobName": "detection-nightly",
                "containerSpecGcsPath": f"{BUCKET}/templates/detect.json",
                "parameters": {
                    "config": "batch_gcs_dataflow_gpu",
                    "input": f"{BUCKET}/images/{{date:%Y/%m/%d}}/**",
                    "dates": THE_DAYS_BEFORE,
                    "time_zone": "UTC",
                    "output": f"{BUCKET}/results",
                    "model": f"{BUCKET}/models/yolov4",
                    "allow_empty": "true",
                },
                "environment": {
                    "serviceAccountEmail": "{{ var.value.detect_service_account }}",
                    "sdkContainerImage": "{{ var.value.detect_image }}",
                    "tempLocation": SCRATCH,
                    "stagingLocation": SCRATCH,
                    "numWorkers": 2,
                    "maxWorkers": 20,
                    "network": NETWORK,
                    "subnetwork": SUBNETWORK,
                    "ipConfiguration": "WORKER_IP_PUBLIC",
                },
            }
        },
    )
