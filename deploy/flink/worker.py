"""Boots a Python worker for a `PROCESS` environment: each TaskManager starts its own, safe beside those of others.

Beam's containers have a Go program for this; here there is none. It asks the runner for what a worker must know, and hands that
to Beam's own entry point in the variables that it expects: https://s.apache.org/beam-fn-api-container-contract.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys


def main() -> None:
    """Boots the worker; ends with it."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--id", required=True)
    flags.add_argument("--provision_endpoint", required=True)
    given, _ = flags.parse_known_args()
    worker = given.id.strip("'")  # Prism writes its flags as if a shell read them

    import grpc
    from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc
    from apache_beam.runners.worker import sdk_worker_main
    from apache_beam.runners.worker.worker_id_interceptor import WorkerIdInterceptor
    from google.protobuf import json_format, text_format

    from pipeline.beam_internals import end_bundles_promptly
    from pipeline.stats.worker_reports import report_all

    def end(*_signal: object) -> None:
        report_all()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    end_bundles_promptly()
    with grpc.insecure_channel(given.provision_endpoint) as channel:
        provisioning = beam_provision_api_pb2_grpc.ProvisionServiceStub(
            grpc.intercept_channel(channel, WorkerIdInterceptor(worker))
        )
        info = provisioning.GetProvisionInfo(beam_provision_api_pb2.GetProvisionInfoRequest()).info
    os.environ.update(
        WORKER_ID=worker,
        PIPELINE_OPTIONS=json_format.MessageToJson(info.pipeline_options),
        CONTROL_API_SERVICE_DESCRIPTOR=text_format.MessageToString(info.control_endpoint),
        LOGGING_API_SERVICE_DESCRIPTOR=text_format.MessageToString(info.logging_endpoint),
        RUNNER_CAPABILITIES=" ".join(info.runner_capabilities),
    )
    sdk_worker_main.main(sys.argv)
    report_all()
    os._exit(0)  # the TaskManager is gone, or needs no worker any more: what it would still hold is no longer its own


if __name__ == "__main__":
    main()
