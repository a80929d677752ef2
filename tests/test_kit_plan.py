"""Where ranks run: every combination of ranks, GPUs, backend and settings."""

import itertools

import pytest
import torch

from labs.kit import world
from labs.kit.plan import plan

CUDA = "cpu:gloo,cuda:nccl"


def test_where_ranks_run():
    """ranks, GPUs, asked for -> place, backend, devices"""
    picture = """
        1 0 auto  cpu    gloo  cpu
        4 0 auto  cpu    gloo  cpu cpu cpu cpu
        2 0 gloo  cpu    gloo  cpu cpu
        1 1 auto  own    nccl  cuda:0
        4 1 auto  shared gloo  cuda:0 cuda:0 cuda:0 cuda:0
        3 2 auto  shared gloo  cuda:0 cuda:1 cuda:0
        2 2 auto  own    nccl  cuda:0 cuda:1
        2 2 nccl  own    nccl  cuda:0 cuda:1
        2 2 gloo  shared gloo  cuda:0 cuda:1
        2 8 auto  own    nccl  cuda:0 cuda:1
    """
    for line in picture.strip().splitlines():
        n_ranks, n_gpus, asked, place, backend, *devices = line.split()
        got = plan(int(n_ranks), int(n_gpus), backend=asked)
        assert got.place == place, line
        assert got.backend == {"nccl": CUDA, "gloo": "gloo"}[backend], line
        assert got.devices == tuple(devices), line


@pytest.mark.parametrize("backend", ["auto", "gloo", "nccl"])
@pytest.mark.parametrize("env", [{}, {"LABS_DEVICE": "cpu"}], ids=["", "cpu"])
def test_every_combination_is_a_sound_plan_or_refused(backend, env):
    for n_ranks, n_gpus in itertools.product(range(1, 9), range(9)):
        usable = 0 if env else n_gpus
        if backend == "nccl" and usable < n_ranks:
            with pytest.raises(ValueError, match=f"{n_ranks} rank.* {usable} GPU"):
                plan(n_ranks, n_gpus, 2, env, backend)
            continue
        got = plan(n_ranks, n_gpus, 2, env, backend)
        assert len(got.devices) == n_ranks == got.n_ranks
        used = {int(name[5:]) for name in got.devices if name != "cpu"}
        assert used == set(range(min(usable, n_ranks)))
        # NCCL refuses two ranks on one GPU.
        assert got.backend == "gloo" or len(used) == n_ranks
        assert (got.place == "cpu") == (usable == 0)
        assert (got.place == "own") == (got.backend == CUDA)


def test_nccl_with_too_few_gpus_is_refused_in_words():
    with pytest.raises(ValueError) as refused:
        plan(4, 1, backend="nccl")
    assert str(refused.value) == (
        "nccl needs a GPU per rank, and this is 4 ranks on 1 GPU: use backend='auto' "
        "(over gloo, ranks share what there is), or start at most 1 rank."
    )
    with pytest.raises(ValueError) as refused:
        plan(1, 0, backend="nccl")
    assert "1 rank on 0 GPUs" in str(refused.value)
    assert "start at most" not in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "threads"),
    [(None, 2), ("3", 3), ("1", 1), ("5,2", 5), ("0", 2), ("", 2), ("many", 2)],
)
def test_threads_are_shared_out_unless_omp_num_threads_is_set(setting, threads):
    env = {} if setting is None else {"OMP_NUM_THREADS": setting}
    assert plan(4, cores=8, env=env).threads == threads


def test_more_ranks_than_cores_have_a_thread_each():
    assert plan(8, cores=2).threads == 1


def test_ranks_of_another_host_do_not_count():
    got = plan(8, 4, 16, backend="nccl", local_ranks=4)
    assert got.place == "own" and len(got.devices) == 4 and got.threads == 4


@pytest.mark.parametrize("n_ranks", [0, -1, 2.5, True, "2", None])
def test_n_ranks_is_a_whole_number_from_1(n_ranks):
    with pytest.raises(ValueError, match="n_ranks must be a whole number from 1 up"):
        plan(n_ranks)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="not 'mpi'"):
        plan(2, backend="mpi")


def test_a_plan_describes_itself():
    assert plan(4, 1).describe("Tesla T4") == "4 ranks · 1 × Tesla T4 shared · gloo"
    assert plan(2, 2).describe("H200") == "2 ranks · a GPU each (H200) · nccl"
    assert plan(1, cores=1).describe() == "1 rank · CPU, 1 thread each · gloo"
    assert plan(2, cores=4).describe() == "2 ranks · CPU, 2 threads each · gloo"


# ---- this machine --------------------------------------------------------------------


def test_one_faked_gpu_is_shared_and_not_given_to_nccl(monkeypatch):
    monkeypatch.delenv("LABS_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert world.plan(4).devices == ("cuda:0",) * 4
    started = []
    monkeypatch.setattr(world._Rank, "start", lambda *args: started.append(args))
    with pytest.raises(ValueError, match="4 ranks on 1 GPU.*backend='auto'"):
        world.launch(print, 4, backend="nccl")
    assert not started


def test_cuda_in_use_by_the_notebook_is_no_reason_to_refuse(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert world.launch(lambda rank, n_ranks: rank + n_ranks, 2) == [2, 3]
