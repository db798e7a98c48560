"""Run by the Python of an Airflow: loads the DAGs, runs the Beam task with other options, and says what it found, as JSON."""

import json
import sys

from airflow.providers.apache.beam.operators.beam import BeamRunPythonPipelineOperator
from airflow.providers.google.cloud.operators.dataflow import DataflowStartFlexTemplateOperator

dags_file, interpreter, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

from airflow.dag_processing.dagbag import DagBag  # noqa: E402  what it logs comes after the arguments were read

bag = DagBag(dag_folder=dags_file)
found = {dag_id: [(task.task_id, type(task).__name__) for task in dag.tasks] for dag_id, dag in bag.dags.items()}
assert found["detect_backfill_dataflow"] == [("backfill", DataflowStartFlexTemplateOperator.__name__)], found
(task,) = bag.dags["detect_backfill"].tasks
assert isinstance(task, BeamRunPythonPipelineOperator)
again = BeamRunPythonPipelineOperator(
    task_id="again",
    py_interpreter=interpreter,
    py_options=task.py_options,
    py_file=task.py_file,
    runner=task.runner,
    pipeline_options={**task.pipeline_options, **options},
)
again.execute({})
print(json.dumps({"errors": bag.import_errors, "dags": found}))
