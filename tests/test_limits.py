"""The limits of a container, from recorded files of cgroups v2, and a real control group that limits memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from pipeline.config import DetectConfig, ModelConfig
from pipeline.detect.load_detector import load_detector
from pipeline.errors import ModelError
from pipeline.limits import MEMORY, PROCESSES, available_cpus, memory_limit_bytes, memory_room_bytes, nvidia_gpus
from tests.fixtures import REPO
from tests.launch.jobs import rows_of
from tests.processes import running, wait_until

CORES = len(os.sched_getaffinity(0))
REAL = Path("/sys/fs/cgroup")


def group_of(root, path, files):
    """A recorded tree of control groups, and the file that names the group of a process."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    root.mkdir(parents=True, exist_ok=True)
    own = root / "own"
    own.write_text(f"12:cpu:/elsewhere\n4:memory:/m\n0::{path}\n")
    return root, own


@pytest.mark.parametrize(
    ("path", "files", "cpus"),
    [
        pytest.param("/", {}, CORES, id="no file"),
        pytest.param("/", {"cpu.max": "max 100000"}, CORES, id="no quota"),
        pytest.param("/", {"cpu.max": "50000 100000"}, 1, id="half a CPU"),
        pytest.param("/", {"cpu.max": "101000 100000"}, min(CORES, 2), id="a little more than one"),
        pytest.param("/", {"cpu.max": "6400000 100000"}, min(CORES, 64), id="more than there are"),
        pytest.param("/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 1, id="of the group above"),
        pytest.param("/out/of/view", {"cpu.max": "50000 100000"}, 1, id="a container that sees only its own group"),
        pytest.param("/../../x", {"cpu.max": "50000 100000"}, 1, id="a group above the mount"),
    ],
)
def test_a_quota_bounds_the_cpus(tmp_path, path, files, cpus):
    assert available_cpus(*group_of(tmp_path / "groups", path, files)) == cpus


@pytest.mark.parametrize(
    ("quota", "cpus"), [("-1", CORES), ("50000", 1), ("101000", min(CORES, 2))], ids=["no quota", "half a CPU", "a little more"]
)
def test_a_quota_of_cgroups_v1_bounds_the_cpus(tmp_path, quota, cpus):
    files = {"cpu/elsewhere/cpu.cfs_quota_us": quota, "cpu/elsewhere/cpu.cfs_period_us": "100000"}
    assert available_cpus(*group_of(tmp_path / "groups", "/", files)) == cpus


@pytest.mark.parametrize(
    ("environment", "cores"),
    [
        ({}, [192]),
        ({PROCESSES: "8"}, [192]),  # the launcher's own process
        ({PROCESSES: "8", "WORKER_ID": "worker_{}"}, [24] * 8),
        ({PROCESSES: "5", "WORKER_ID": "worker_{}"}, [39, 39, 38, 38, 38]),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "{}"}, [96, 96]),
    ],
    ids=str,
)
def test_the_processes_of_a_launcher_divide_the_cores_of_their_host(tmp_path, monkeypatch, environment, cores):
    """So their feeder processes are as many as cores, and what they buffer, decode and load takes the memory of one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(192)))
    whole = MEMORY.room_bytes()
    for number, expected in enumerate(cores):
        for name, value in environment.items():
            monkeypatch.setenv(name, value.format(number))
        assert available_cpus(*group_of(tmp_path / "groups", "/", {})) == expected
        assert MEMORY.room_bytes() == pytest.approx(whole / len(cores), rel=0.5)  # other programs take and give back memory
        assert MEMORY.budget() == pytest.approx(whole / len(cores) / 4, rel=0.5)


@pytest.mark.parametrize(
    ("files", "limit", "room"),
    [
        ({}, None, 1_024_000),
        ({"memory.max": "max", "memory.stat": "anon 1"}, None, 1_024_000),
        ({"memory.max": "900000", "memory.stat": "anon 100000\nfile 1"}, 900_000, 800_000),
        ({"memory.max": "900000", "memory.stat": "anon 100000\nfile 1\nshmem 500000"}, 900_000, 300_000),
        (
            {
                "memory/m/memory.limit_in_bytes": "800000",
                "memory/m/memory.stat": "rss 1\ntotal_rss 100000\ntotal_shmem 500000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.stat": "total_rss 900000",
            },
            800_000,
            200_000,
        ),
        ({"memory.max": "9", "memory.stat": "anon 2", "a/memory.max": "500000", "a/memory.stat": "anon 1"}, 9, 7),
        ({"memory.max": "900", "memory.stat": "anon 2", "a/memory.max": "500", "a/memory.stat": "anon 1"}, 500, 499),
    ],
    ids=[
        "no group",
        "no limit",
        "what the group leaves",
        "shared memory counts",
        "version 1",
        "least of the group above",
        "least of the group",
    ],
)
def test_the_least_memory_limit_and_what_machine_and_groups_leave_count(tmp_path, files, limit, room):
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    1000 kB\n")
    group = group_of(tmp_path / "groups", "/a", files)
    assert (memory_limit_bytes(*group), memory_room_bytes(*group, tmp_path / "meminfo")) == (limit, room)


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        ("2,5", 2),
        ("GPU-3a1f,GPU-7", 2),
        ("MIG-3a1f,MIG-7", 1),
        ("0,-1,1", 1),
        ("7,0,1,2", 3),
        ("", 0),
        ("-1", 0),
        ("void", 0),
        ("-1,MIG-7", 0),
    ],
)
def test_the_gpus_that_cuda_may_see_count(tmp_path, monkeypatch, listed, gpus):
    """Of parts of GPUs (MIG) it shows a process one."""
    for number in range(3):
        (tmp_path / f"nvidia{number}").touch()
    assert nvidia_gpus(f"{tmp_path}/nvidia*") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert nvidia_gpus(f"{tmp_path}/nvidia*") == gpus


@pytest.mark.parametrize(("listed", "gpus"), [(None, 1), ("0", 1), ("-1", 0)])
def test_wsl2_and_jetson_have_one_gpu_without_a_numbered_device(tmp_path, monkeypatch, listed, gpus):
    """ONNX Runtime used the CPU there, and nobody said so."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    given = f"{tmp_path}/nvidia*", [f"{tmp_path}/libcuda.so.1"]
    assert nvidia_gpus(*given) == 0
    (tmp_path / "libcuda.so.1").touch()
    assert nvidia_gpus(*given) == gpus


@pytest.mark.slow
def test_a_limit_that_the_model_does_not_fit_is_an_error_of_one_line(bright_model):
    try:
        with pytest.raises(ModelError, match=r"needs at least \d+ MB; memory_mb or the container allows 100 MB$"):
            load_detector(ModelConfig(path=bright_model), DetectConfig(memory_mb=100, batch_sizes=(1,)))
    finally:
        MEMORY.narrow(None)


@pytest.fixture
def memory_group():
    """A control group of either version, and its file with the limit; only a privileged user can make one."""
    for parent, name in ((REAL, "memory.max"), (REAL / "memory", "memory.limit_in_bytes")):
        group = parent / f"limits-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                yield group, group / name
                wait_until(lambda procs=group / "cgroup.procs": not procs.read_text())  # feeder processes end after their job
                return
        finally:
            group.rmdir()
    pytest.skip("no control group that limits memory can be made")


@pytest.mark.matrix
def test_images_in_hand_shrink_before_the_kernel_kills(memory_group, tmp_path):
    """The images have 480 MB, and the limit leaves 170 MB beside the model; without `memory_mb` the kernel ends this job."""
    group, limit = memory_group
    noise = np.random.default_rng(0).integers(0, 255, (2000, 2000, 3), np.uint8)
    content = cv2.imencode(".png", noise)[1].tobytes()
    for number in range(40):
        (tmp_path / f"{number}.png").write_bytes(content)
    command = [sys.executable, "-m", "pipeline.run", "--input", tmp_path, "--output", tmp_path / "out", "--model", "digits"]

    def run(memory_mb):
        limited = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command, "--memory-mb", memory_mb]
        with running([*map(str, limited)], stderr=subprocess.PIPE, cwd=REPO) as process:
            return process.communicate()[1].decode(), process.returncode

    error, code = run(1)
    assert code == 2
    memory_mb = int(re.search(r"needs at least (\d+) MB", error)[1]) + 110
    limit.write_text(str(memory_mb * 10**6))
    error, code = run(memory_mb)
    assert code == 0, error
    assert len(rows_of(tmp_path / "out")) == 40
