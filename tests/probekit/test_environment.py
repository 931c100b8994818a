"""The rank of this process, from its launcher's environment."""

from __future__ import annotations

import pytest

from distdiag.errors import DistdiagError
from distdiag.probekit.ranks.environment import detect, first_host

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29501"}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "123456",
}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


def test_without_a_launcher_there_is_no_rank():
    assert detect({}) is None
    assert detect({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}) is None  # an sbatch script is not a job step


def test_torchruns_environment_is_read():
    p = detect(TORCHRUN)
    assert p is not None
    assert (p.launcher, p.rank, p.world_size, p.local_rank, p.local_world_size) == ("torchrun", 3, 8, 1, 2)
    assert (p.master_addr, p.master_port) == ("node0", 29501)


def test_sruns_rendezvous_is_the_first_node_with_a_port_from_the_job_id():
    p = detect(SRUN)
    assert p is not None
    assert (p.launcher, p.rank, p.world_size, p.local_rank, p.local_world_size) == ("srun", 5, 8, 1, 4)
    assert (p.master_addr, p.master_port) == ("gpu03", 23456)


def test_mpiruns_environment_is_read_on_one_host_and_on_several():
    p = detect(MPIRUN)
    assert p is not None
    assert (p.launcher, p.rank, p.world_size, p.master_addr) == ("mpirun", 1, 2, "127.0.0.1")
    with pytest.raises(DistdiagError, match="MASTER_ADDR"):
        detect(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    elsewhere = detect(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert elsewhere is not None and (elsewhere.master_addr, elsewhere.master_port) == ("10.0.0.1", 4000)
    intel = detect({"PMI_RANK": "0", "PMI_SIZE": "2"})
    assert intel is not None and intel.launcher == "mpirun"


@pytest.mark.parametrize(
    "broken", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}]
)
def test_a_broken_environment_is_an_error_with_a_hint(broken: dict[str, str]):
    with pytest.raises(DistdiagError) as e:
        detect(broken)
    assert e.value.hint


@pytest.mark.parametrize(
    ("folded", "host"),
    [("node[03-07,9],login1", "node03"), ("n1", "n1"), ("a,b", "a"), ("rack[1,5]-ib", "rack1-ib"), ("", "")],
)
def test_the_first_host_of_a_folded_list_is_read(folded: str, host: str):
    assert first_host(folded) == host
