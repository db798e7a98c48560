"""What the pipeline needs to run, and with its extras; name, version and commands stand in pyproject.toml."""

import os

from setuptools import find_packages, setup

OF_TENSORFLOW = ["tensorflow>=2.21,<2.22", "tfx-bsl>=1.21,<1.22"]
WITHOUT_TENSORFLOW = os.environ.get("WITHOUT_TENSORFLOW") == "1"  # for jobs with ONNX files alone; see docs/operations.md

EXTRAS = {
    "tensorflow": OF_TENSORFLOW,  # part of each installation but of one without TensorFlow
    "openvino": ["openvino>=2026.4.1,<2027", "onnx>=1.17,<2"],  # another engine for CPUs (--engine openvino)
    # ONNX files (--engine onnxruntime); on a GPU onnxruntime-gpu instead; onnxconverter-common makes float16 of a file
    "onnxruntime": ["onnxruntime>=1.23,<2", "onnx>=1.17,<2", "onnxconverter-common>=1.15,<2"],
    "quantize": ["nncf>=3.4,<3.5", "openvino>=2026.4.1,<2027"],  # an int8 version of a model (detect-objects quantize)
    # model servers (--engine triton); TFX allows no protobuf on Python 3.10 that is new enough for it
    "triton": ["tritonclient[grpc]>=2.73,<3; python_version >= '3.11'"],
    # opens runs (detect-objects view); MongoDB comes with it, or FIFTYONE_DATABASE_URI names one
    "fiftyone": ["fiftyone>=1.22,<2"],
    "heif": ["pillow-heif>=1.1,<2"],  # HEIC and HEIF; its licence is that of the codecs in it (LGPL and GPL)
    "azure": ["azure-identity>=1.19,<2", "azure-storage-blob>=12.24,<13"],  # images and results on Azure Blob Storage
    "s3": ["boto3>=1.40,<2"],  # images and results on Amazon S3
    "video": ["av>=17,<19"],  # frames of videos
    "voc": ["defusedxml>=0.7,<1"],  # labels as Pascal VOC
}
TESTED = ["azure", "heif", "onnxruntime", "openvino", "quantize", "s3", "triton", "video", "voc"]
# what tests, checks and benchmarks need beside these
OF_TESTS = [
    "duckdb>=1.1,<3",  # reads results folders, as users do
    "gcp-storage-emulator>=2026.7",
    "hypothesis>=6.100",
    "import-linter>=2.11",
    "kubernetes-validate>=1.31",  # the schemas of Kubernetes
    "labelformat>=0.1.17,<1",  # reads what the pipeline writes for CVAT
    "mkdocs>=1.6,<2",
    "mypy>=2.4",
    "playwright>=1.50,<2",
    "psutil>=6",
    "pycocotools>=2.0.8",
    "pytest>=8",
    "pytest-randomly>=3.15",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "python-hcl2>=8,<9",
    "ruff>=0.17",
    "scikit-learn>=1.5",
    "sqlglot>=30,<31",  # parses BigQuery's dialect
    "supervision>=0.31.2,<1",  # reads labels that the pipeline writes
    "types-pyyaml",
]

setup(
    packages=[*find_packages(include=["pipeline", "pipeline.*", "models", "models.*"]), "pipeline.configs"],
    package_dir={"pipeline.configs": "configs"},  # beside the code in a checkout, inside it where it is installed
    package_data={
        "models": ["digits/*.md", "digits/samples/*", "digits/1/*", "digits/1/assets.extra/*", "digits/1/variables/*"],
        "pipeline.configs": ["*.yaml"],
        "pipeline.report": ["*.css", "*.html"],
    },
    install_requires=[
        "apache-beam[gcp]>=2.77,<2.80; python_version >= '3.11'",
        "apache-beam[gcp]>=2.75,<2.80; python_version < '3.11'",  # newer ones and tfx-bsl want different protobufs there
        *([] if WITHOUT_TENSORFLOW else OF_TENSORFLOW),
        "msgspec>=0.21,<1",
        "numpy>=2,<3",
        "cachetools>=5,<7",
        "google-cloud-bigquery>=3.27,<4",
        "google-cloud-storage>=3,<4",
        "google-cloud-pubsub>=2.30,<3",
        "jinja2>=3.1,<4",
        "opencv-python-headless>=4.13,<5",  # 5 no longer reads Darknet models, which the benchmarks compare with
        "pandas>=2.2.2,<2.4",  # Beam's notebook runner breaks with newer ones
        "pillow>=11.3,<13",
        "prometheus_client>=0.22,<1",
        "pyarrow>=16,<26",
        "pydantic>=2.11,<3",
        "pyyaml>=6,<7",
        "requests>=2.31,<3",
        "tqdm>=4.66,<5",
        "urllib3>=2.2,<3",
    ],
    extras_require={**EXTRAS, "dev": sorted({each for name in TESTED for each in EXTRAS[name]}) + OF_TESTS},
)
