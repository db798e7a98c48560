"""The machines that a job asks for: which of them have the accelerator, and Beam's flags for their network."""

from __future__ import annotations

from pipeline.config import WorkerConfig
from pipeline.errors import ConfigError

# https://cloud.google.com/compute/docs/gpus: an accelerator goes with machines of one family, and with no other
_FAMILIES = {
    "nvidia-tesla-t4": "n1",
    "nvidia-tesla-p4": "n1",
    "nvidia-tesla-p100": "n1",
    "nvidia-tesla-v100": "n1",
    "nvidia-l4": "g2",
    "nvidia-tesla-a100": "a2",
    "nvidia-a100-80gb": "a2",
    "nvidia-h100-80gb": "a3",
    "nvidia-h100-mega-80gb": "a3",
}
_EXAMPLES = {"n1": "n1-standard-8", "g2": "g2-standard-8", "a2": "a2-highgpu-1g", "a3": "a3-highgpu-1g"}


def network_flags(worker: WorkerConfig) -> list[str]:
    """Beam's flags for the network of the workers."""
    named = {"network": worker.network, "subnetwork": worker.subnetwork}
    flags = [f"--{name}={value}" for name, value in named.items() if value]
    return flags if worker.use_public_ips else [*flags, "--no_use_public_ips"]


def check_machine(accelerator: str, machine_type: str | None) -> None:
    """Makes sure that machines of a type can have an accelerator; one that is not known here is for the service to judge.

    Args:
      accelerator: As Dataflow writes it: `type:nvidia-l4;count:1;install-nvidia-driver`.
      machine_type: Of the workers; None: the service's default, which has none.

    Raises:
      ConfigError: They cannot.
    """
    parts = dict(part.strip().partition(":")[::2] for part in accelerator.split(";"))
    name = parts.get("type", "")
    family = _FAMILIES.get(name)
    if family and not (machine_type or "").startswith(f"{family}-"):
        expected = f"--machine_type {family}-*, such as {_EXAMPLES[family]}"
        raise ConfigError(f"worker.accelerator {name}: expected {expected}; got {machine_type or 'no --machine_type'}")
