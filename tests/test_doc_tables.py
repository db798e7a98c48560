"""Each row of the tables in docs/ that says how the program behaves has a test of this suite."""

import re

import pytest

from pipeline.failures import REASONS
from tests.fixtures import REPO

# Pages of other kinds: reasons, words, costs that were measured, settings that are written from the code.
WITHOUT_BEHAVIOUR = {"docs/design.md", "docs/glossary.md", "docs/COST.md", "docs/settings.md"}
MEASURED = {"largest difference, of the tolerance", "AP50 float32 and int8"}  # columns of tables with figures of named models

FAMILIES = "detect/test_families.py::test_boxes_are_those_of_the_tools_own_steps"
EACH_FORM_OF_LABELS = "models/test_evaluate_labels.py::test_each_form_has_the_figures_of_the_same_coco_annotations"
ETAG_STORES = "read/test_etag_stores.py::test_a_job_reads_adds_and_reconciles_images_there"
NEWEST = "write/test_export.py::test_of_two_runs_the_newest_row_of_each_image_counts_also_after_a_compaction"
OWN_SIZE = "detect/test_own_size.py::test_boxes_are_those_of_tensorflow_called_directly"
STATUS = "read/test_reconciled.py::test_the_status_of_an_image"
STUCK = "monitoring/test_watchdog.py::test_a_part_with_work_that_does_not_move_is_stuck_after_the_time"
BEAM_METRICS = "stats/test_metrics.py::test_the_metrics_of_a_batch_job_are_those_of_its_summary"

TESTS = {  # page: first cell of a row: its test; an empty cell repeats the one above it
    "docs/models.md": {
        "Darknet YOLO": "launch/test_darknet_job.py::test_imported_darknet_models_detect_what_opencv_detects",
        "Darknet, imported": "launch/test_darknet_job.py::test_imported_darknet_models_detect_what_opencv_detects",
        "Keras": "test_import_model.py::test_a_keras_file_is_exported_and_recognised",
        "TF Object Detection API": OWN_SIZE,
        "Ultralytics YOLO": "detect/test_packed_output.py::test_what_the_export_says_of_itself_is_taken",
        "YOLOv4 of tensorflow-yolov4-tflite, YOLOX": FAMILIES,
        "ONNX": "models/test_import_onnx.py::test_small_onnx_models_are_imported_and_detect",
        "any other SavedModel": "detect/test_saved_model.py::test_foreign_models_find_the_same_box",
        "YOLOv5, YOLOv8": "detect/test_packed_output.py::test_the_boxes_are_those_of_a_plain_reading",
        "YOLOv4 of tensorflow-yolov4-tflite": (
            "detect/test_mixed_batches.py::test_a_yolov4_of_tensorflow_answers_for_each_image_what_it_answers_alone"
        ),
        "YOLOX": FAMILIES,
        "YOLOv6": FAMILIES,
        "YOLO-NAS": FAMILIES,
        "DETR": FAMILIES,
        "RT-DETR, Deformable": FAMILIES,
        "RT-DETR of Ultralytics": FAMILIES,
        "TensorFlow Serving": ("detect/test_remote_model.py::test_tensorflow_serving_gives_the_rows_of_the_same_saved_model"),
        "Triton": "detect/test_remote_model.py::test_the_bundled_detector_gives_the_rows_of_tensorflow",
    },
    "docs/batch.md": {
        "a local path": "read/test_list_images.py::test_patterns_mean_what_a_user_means",
        "gs://": "read/test_list_images.py::test_a_folder_of_object_storage_needs_no_slash",
        "archive.zip": "read/test_archives.py::test_a_generation_is_the_same_until_the_content_changes",
        "clip.mp4": "read/test_videos.py::test_the_generation_of_a_frame_is_that_of_its_file",
        "an image in a TFRecord": "read/test_done_rows.py::test_images_in_tfrecord_files_are_left_out_by_their_content",
        "http://": "read/test_web.py::test_content_comes_whole_with_the_generation_that_a_look_says",
        "s3://": ETAG_STORES,
        "abfs://": ETAG_STORES,
        "other addresses": "read/test_fetch.py::test_an_address_that_only_beam_could_read_is_refused_in_one_line_that_says_so",
        "0": "launch/test_batch_job.py::test_the_contract_of_the_output",
        "1": "launch/test_batch_job.py::test_too_many_dead_letters_are_a_failure_whose_rows_and_reports_are_there",
        "2": "test_run.py::test_a_mistake_is_one_line_and_exit_code_2_without_tensorflow",
        "3": "launch/test_lock_job.py::test_one_that_cannot_wait_ends_with_an_exit_code_of_its_own",
        "130": "launch/test_batch_job.py::test_a_stopped_run_says_so_in_one_line_and_the_same_command_does_the_rest",
    },
    "docs/evaluation.md": {
        "COCO": "models/test_evaluate.py::test_the_figures_are_those_of_pycocotools",
        "YOLO": EACH_FORM_OF_LABELS,
        "Pascal VOC": EACH_FORM_OF_LABELS,
        "FiftyOne": EACH_FORM_OF_LABELS,
    },
    "docs/results.md": {
        "shard": "results/test_shards.py::test_rows_are_read_back_as_they_were_whatever_they_are_called",
        "view": "results/test_shards.py::test_the_view_is_there_before_its_shard_and_says_the_same",
        "key": "results/test_shards.py::test_a_detection_and_a_dead_letter_of_one_image_have_one_key",
        "uri": "results/test_shards.py::test_rows_are_read_back_as_they_were_whatever_they_are_called",
        "generation": "launch/test_only_new.py::test_runs_add_up_and_what_an_earlier_one_left_is_kept",
        "model, version": (
            "detect/test_model_versions.py::test_swaps_under_load_lose_no_image_and_each_row_says_which_version_made_it"
        ),
        "settings": "launch/test_only_new.py::test_other_settings_are_other_rows_and_stand_beside",
        "run, made_at": NEWEST,
        "width, height": "launch/test_batch_job.py::test_the_contract_of_the_output",
        "stage, reason": "launch/test_batch_job.py::test_dead_letters_can_be_given_as_input_again",
        "summary.json": "launch/test_batch_job.py::test_the_contract_of_the_output",
        "report.html": "report/test_page_in_browser.py::test_filters_hide_pictures_and_go_together",
        "exports/": "write/test_export.py::test_a_job_exports_what_counts_as_done_for_it",
        "samples/*.jpg": "stats/test_samples.py::test_purposes_take_turns_and_others_fill_up",
        "none": "launch/test_batch_job.py::test_boxes_are_in_pixels_of_the_original_image",
        "tfrecord": "write/test_write_tfrecord.py::test_each_row_is_a_record_that_tensorflow_parses",
        "csv": "write/test_formats.py::test_pandas_reads_a_line_for_each_detection",
        "yolo": "write/test_formats.py::test_supervision_reads_labels_in_yolos_format",
        "voc": "write/test_formats.py::test_supervision_reads_pascal_voc",
        "cvat": "write/test_formats.py::test_labelformat_reads_what_cvat_imports",
        "label-studio": "write/test_formats.py::test_label_studio_gets_tasks_with_predictions_as_its_guide_has_them",
        "coco": "write/test_write_coco.py::test_pycocotools_loads_both_files",
        "crops": "write/test_export.py::test_crops_are_cut_from_the_images_of_the_newest_rows",
        "detect-objects pictures --annotate": (
            "models/test_pictures.py::test_a_drawn_image_has_its_full_size_and_only_its_boxes_differ"
        ),
        "message": "stream/test_messages.py::test_what_asks_for_nothing_is_a_dead_letter_with_the_message_as_payload",
        "read": "read/test_storage_failures.py::test_each_failure_is_known_as_what_it_is",
        "decode": "detect/test_decode_hostile.py::test_the_hostile_files_of_others_end_as_rows_or_dead_letters",
        "detect": "detect/test_detector.py::test_a_dead_letter_names_the_version_that_failed_and_no_other_image_a_model",
        "answer": "stream/test_request_aggregator.py::test_at_the_deadline_what_is_missing_is_named",
    },
    "docs/streaming.md": {
        "Cloud Storage notification": (
            "stream/test_messages.py::test_a_storage_notification_asks_for_that_generation_of_the_object"
        ),
        "one image, JSON": "stream/test_messages.py::test_uris_are_found_in_json_and_in_plain_text",
        "a request, JSON": "stream/test_messages.py::test_the_request_id_goes_to_every_image_and_dead_letter",
        "text": "stream/test_messages.py::test_uris_are_found_in_json_and_in_plain_text",
        "raw bytes": "stream/test_messages.py::test_raw_image_bytes_are_recognised_with_and_without_a_content_type",
        "dead letter": "stream/test_messages.py::test_a_dead_letter_as_a_message_asks_for_its_image_again",
        "--dead-letter-topic": "launch/test_streaming.py::test_what_is_no_request_is_a_dead_letter_and_stops_nothing",
        "--answer-topic": "launch/test_streaming.py::test_each_request_is_answered_once_with_all_its_images",
        "<archive>/detections/": (
            "stream/test_archive.py::test_a_message_is_held_until_all_of_its_rows_are_in_shards_of_their_window"
        ),
        "<archive>/summary.json": "launch/test_streaming.py::test_sigterm_ends_the_job_well",
        "DirectRunner, PrismRunner": "launch/test_streaming.py::test_a_killed_job_loses_nothing_on_prism",
        "FlinkRunner": "flink/test_streaming.py::test_no_answer_is_lost_where_all_machines_die_when_a_checkpoint_completes",
        "PortableRunner": "launch/test_runners.py::test_a_job_server_that_listens_is_enough",
        "DataflowRunner": "launch/test_dataflow.py::test_the_streaming_job_asks_for_what_its_config_says",
        "SparkRunner": "spark/test_batch.py::test_a_stream_is_refused_in_one_line",
    },
    "docs/deploy.md": {
        "one machine, one process": "launch/test_batch_job.py::test_the_contract_of_the_output",
        "one machine, several GPUs": "detect/test_share_gpus.py::test_each_process_has_a_gpu_of_its_own_until_all_are_taken",
        "Prism": "launch/test_batch_job.py::test_prism_gives_the_same_rows_and_files_as_the_direct_runner",
        "Flink": "flink/test_batch.py::test_a_batch_job_that_loses_a_machine_gives_the_rows_of_a_run_on_one",
        "Spark": "spark/test_batch.py::test_a_batch_job_on_spark_gives_the_rows_of_a_run_on_this_machine",
        "Dataflow": "launch/test_dataflow.py::test_the_batch_job_asks_for_what_its_config_says",
    },
    "docs/operations.md": {
        "detect-objects ": "test_commands.py::test_each_verb_teaches_itself_under_its_own_name",
        "detection_": (
            "monitoring/test_served_metrics.py::test_a_real_prometheus_has_data_for_every_metric_of_a_stream_under_load"
        ),
        "/livez": "monitoring/test_health.py::test_a_job_with_a_stuck_part_is_not_live",
        "/readyz": "monitoring/test_health.py::test_while_a_service_fails_a_job_is_live_but_not_ready",
        "pull": STUCK,
        "subscriber": STUCK,
        "read": STUCK,
        "detector": STUCK,
        "publish": STUCK,
        "archive": STUCK,
        "counters": BEAM_METRICS,
        "distributions": BEAM_METRICS,
        "streams also": "stats/test_metrics.py::test_both_tables_name_every_metric",
        "model versions": "stats/test_metrics.py::test_both_tables_name_every_metric",
        "pipeline.run": "launch/test_batch_job.py::test_too_many_dead_letters_are_a_failure_whose_rows_and_reports_are_there",
        "pipeline.load_bigquery": "results/test_bigquery.py::test_a_file_that_bigquery_refuses_costs_no_other_file",
        "pipeline.compact": "test_compact.py::test_a_second_compaction_beside_the_first_is_refused",
        "pipeline.export": "write/test_export.py::test_what_cannot_be_exported_is_told_in_one_line",
        "pipeline.reconcile": "test_reconcile.py::test_what_a_job_did_is_complete_and_what_came_afterwards_is_missing",
        "models.pictures": "models/test_pictures.py::test_images_that_cannot_be_used_are_counted_by_reason",
        "pipeline.import_model": "test_import_model.py::test_a_folder_without_a_model_is_refused_in_one_line",
        "pipeline.quantize": "test_quantize.py::test_a_version_beyond_the_bound_is_refused_in_one_line",
        "pipeline.tune": "test_tune.py::test_a_wrong_place_is_one_line",
        "models.evaluate": "models/test_evaluate.py::test_wrong_arguments_are_told_in_one_line_with_exit_code_2",
        "pipeline.doctor": "test_doctor.py::test_the_exit_code_says_whether_something_essential_is_broken",
    },
    "docs/backfill.md": {
        "done": STATUS,
        "dead": STATUS,
        "stale": STATUS,
        "missing": STATUS,
        "doubled": STATUS,
        "orphaned": STATUS,
    },
}


def first_cells(page: str) -> list[str]:
    """The first cell of each row, without its markup."""
    cells: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", (REPO / page).read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = table.splitlines()
        if not any(f"| {column} |" in head for column in MEASURED):
            cells += [row.split("|")[1].replace("`", "").strip() for row in rows]
    return [cell for cell in cells if cell]


def test_each_page_with_tables_is_known():
    pages = {f"docs/{path.name}" for path in (REPO / "docs").glob("*.md") if re.search(r"^\|", path.read_text(), re.MULTILINE)}
    assert pages == {*TESTS, *WITHOUT_BEHAVIOUR}


@pytest.mark.parametrize("page", TESTS)
def test_each_row_has_a_test_and_each_test_exists(page):
    cells, tests = first_cells(page), TESTS[page]
    assert [cell for cell in cells if not any(cell.startswith(row) for row in tests)] == []
    assert [row for row in tests if not any(cell.startswith(row) for cell in cells)] == []
    for test in tests.values():
        file, _, name = test.partition("::")
        assert re.search(rf"def {name}\b", (REPO / "tests" / file).read_text(encoding="utf-8")), test


def test_each_reason_of_a_dead_letter_is_expected_by_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in (REPO / "tests").rglob("test_*.py"))
    assert [reason for reasons in REASONS.values() for reason in reasons if f'"{reason}"' not in tests] == []
