"""What a GPU changes: staging, events, turns. With fakes here, for real on a GPU.

The checks for real are those of tools/gpu_check.py; without a GPU they are skipped.
"""

import json
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from labs.kit import clock, messages
from labs.kit.timeline import Op
from labs.kit.world import launch
from tools import gpu_check

pytestmark = pytest.mark.timeout(300)
has_gpu = torch.cuda.is_available()
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(gpu_check)


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.skipif(not has_gpu, reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", gpu_check.checks())
def test_on_a_gpu(name, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpu_check.checks()[name]()


# ---- the same programs on the CPU ----------------------------------------------------


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_c03_values(n_ranks, monkeypatch):
    monkeypatch.setenv("LABS_DEVICE", "cpu")
    for rank, found in enumerate(launch(gpu_check.collectives, n_ranks, limit=60)):
        values = {name: value for name, (value, _) in found.items()}
        assert values == gpu_check.expected(rank, n_ranks)
        assert {device for _, device in found.values()} == {"cpu"}


def test_c03_expects_the_values_of_the_case():
    assert gpu_check.expected(1, 2)["received"] == [0, 1, 2, 3]
    assert gpu_check.expected(1, 2)["all_reduce"] == [1, 3, 5, 7]


@pytest.mark.parametrize("check", [gpu_check.check_events, gpu_check.check_timed])
def test_programs_of_the_clocks(check, monkeypatch):
    monkeypatch.setenv("LABS_DEVICE", "cpu")
    monkeypatch.setattr(gpu_check, "SIZE", 256)
    assert check()


# ---- staging, with a fake device -----------------------------------------------------


class FakeHost(torch.Tensor):
    """Memory of the host that can be moved to a GPU."""

    def to(self, device):
        assert device == FakeCuda.device
        return self.clone().as_subclass(FakeCuda)


class FakeCuda(FakeHost):
    """A tensor that says it is on a GPU; its bytes are in the host's memory."""

    device = torch.device("cuda", 0)
    is_cuda = True


class Loop:
    """A process group of two ranks in one process: what is sent waits to be taken."""

    def __init__(self):
        self.me, self.line = 0, []

    def rank(self):
        return self.me

    def size(self):
        return 2

    def send(self, tensors, to, tag):
        (tensor,) = tensors
        assert type(tensor) is not FakeCuda and tensor.is_contiguous()
        self.line.append(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors, source, tag):
        (tensor,), sent = tensors, self.line.pop(0)
        assert type(tensor) is not FakeCuda and len(tensor) >= len(sent)
        tensor[: len(sent)].copy_(sent)  # gloo fills a longer one in part
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def loop(monkeypatch):
    """Two ranks that share a fake GPU; `loop.pinned` are the host buffers' shapes."""
    loop, make, inside = Loop(), messages._host_tensor, messages._inside
    loop.pinned = []

    def host_tensor(shape, dtype, pinned):
        if pinned:
            loop.pinned.append(tuple(shape))
        buffer = make(shape, dtype, pinned=False)
        return buffer.as_subclass(FakeHost) if pinned else buffer

    def inside_host(*args):
        return inside(*args).as_subclass(FakeHost)

    world = SimpleNamespace(group=SimpleNamespace(WORLD=loop))
    monkeypatch.setattr(messages, "dist", world)
    monkeypatch.setattr(messages, "_host_tensor", host_tensor)
    monkeypatch.setattr(messages, "_inside", inside_host)
    monkeypatch.setattr(messages, "_last", {})
    monkeypatch.setattr(messages, "device", FakeCuda.device)
    monkeypatch.setattr(messages, "staged", True)
    return loop


def on_gpu(tensor):
    return tensor.as_subclass(FakeCuda)


def across(loop, tensor, into=None):
    """Send from rank 0, receive as rank 1."""
    loop.me = 0
    messages.isend(tensor, 1).wait()
    loop.me = 1
    received = messages.receive(0, into=into)
    assert loop.line == [] and messages._unfinished == {}
    return received


SMALL, LARGE = (3, 5), (300, 100)
BYTES = (120_000,)  # of LARGE: it is received before its shape is known


@pytest.mark.parametrize(
    "shape, pinned", [(LARGE, [LARGE, BYTES]), (SMALL, []), ((), []), ((0, 2), [])]
)
def test_a_gpus_tensor_travels_through_the_host(loop, shape, pinned):
    """A large one through pinned memory: once to send, once to receive."""
    sent = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    received = across(loop, on_gpu(sent))
    assert type(received) is FakeCuda and received.device == FakeCuda.device
    assert received.tolist() == sent.tolist() and received.dtype == sent.dtype
    assert loop.pinned == pinned


@pytest.mark.parametrize("n", [2, 20_000])
def test_into_a_gpus_tensor(loop, n):
    """Also into a view, whose neighbours stay as they are."""
    base, sent = torch.zeros(2 * n), torch.arange(1.0, n + 1)
    into = on_gpu(base)[::2]
    assert type(into) is FakeCuda
    assert across(loop, on_gpu(sent), into) is into
    assert torch.equal(base[::2], sent) and not base[1::2].any()


def test_into_the_hosts_memory(loop):
    """What a GPU sends may be wanted on the host: then only the sender stages."""
    into = torch.zeros(LARGE)
    assert across(loop, on_gpu(torch.ones(LARGE)), into) is into
    assert into.min() == 1 and loop.pinned == [LARGE]


def test_a_host_tensor_is_not_staged_to_be_sent(loop):
    received = across(loop, torch.ones(LARGE))
    assert type(received) is FakeCuda and received.min() == 1
    assert loop.pinned == [BYTES]


def test_collectives_of_a_shared_gpu_work_on_the_host(loop):
    calls = []

    class Moving(FakeCuda):
        def to(self, where, dtype):
            calls.append(where)
            return torch.tensor(self.tolist(), dtype=dtype)

    tensor = torch.tensor([1.0, 2.0]).as_subclass(Moving)
    dense = messages._dense(tensor, torch.float64)
    assert calls == ["cpu"] and dense.dtype == torch.float64
    messages._put(dense * 3, tensor)
    assert tensor.tolist() == [3.0, 6.0]


def test_equal_messages_take_one_transfer_each(loop):
    """The first large one takes two; then both sides know what to expect. What is too
    large to be copied always takes two, and its header stays small; when it was not
    of the size expected, one byte fills the receive that waits for it."""
    transfers, send = [], loop.send

    def counted(tensors, to, tag):
        transfers.append(len(tensors[0]))
        return send(tensors, to, tag)

    loop.send = counted

    def count(size):
        transfers.clear()
        sent = torch.arange(size, dtype=torch.uint8)
        loop.me = 0
        messages.isend(sent, 1)
        loop.me = 1
        assert messages.receive(0).tolist() == sent.tolist()
        messages.finish()
        return len(transfers)

    sizes = [100, 0, 4096, 5000, 5000, 4999, 5000, 65536, 65536, 65537, 65537]
    assert list(map(count, sizes)) == [1, 1, 1, 2, 1, 1, 2, 2, 1, 2, 2]
    assert list(map(count, [70_000, 69_000, 69_001, 10, 10])) == [3, 2, 3, 2, 1]
    count(1_000_000)
    count(1_000_000)
    assert transfers[0] < 5000 and transfers[1] == 1_000_000


# ---- clocks, with fake events --------------------------------------------------------


@pytest.fixture
def fake_cuda(monkeypatch):
    """CUDA in use, as the clocks see it; returns the list of what they asked for."""
    asked = []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            asked.append("record")

        def elapsed_time(self, later):
            asked.append("read")
            return 0.0

    fake = SimpleNamespace(
        Event=Event,
        is_initialized=lambda: True,
        current_device=lambda: 3,
        synchronize=lambda: asked.append("synchronize"),
    )
    monkeypatch.setattr(clock.torch, "cuda", fake)
    return asked


class Worker:
    def forward(self, i):
        return i


def test_wall_time_takes_events_and_reads_them_at_the_end(fake_cuda):
    worker = clock.watch(Worker(), forward="F")
    with clock.recording(clock.Wall(), 0) as clk:
        assert fake_cuda == ["synchronize", "record"]  # the zero of its time
        fake_cuda.clear()
        assert worker.forward(0) == 0
        assert fake_cuda == ["record", "record"]  # the GPU is not held up
    assert fake_cuda[2:] == ["synchronize", "read", "read"]
    assert [span.op for span in clk.spans] == [Op("F", 0)]


def test_a_message_begins_when_the_gpu_has_computed_it(fake_cuda):
    clk = clock.Wall()
    clk.begin(0)
    fake_cuda.clear()
    assert clk.ready() > 0
    assert fake_cuda == ["synchronize"]


def test_timed_operations_take_turns_on_each_gpu(fake_cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("LABS_RUN", "some")
    monkeypatch.setattr(clock, "folder_of", lambda run: tmp_path / run)
    result, seconds = clock.Timed(slots=8)(0, "F", 0, lambda: 5)
    assert result == 5 and seconds > 0
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["gpu-3"]
    assert fake_cuda == ["synchronize", "synchronize"]  # before and after the work


# ---- the script ----------------------------------------------------------------------


@pytest.mark.skipif(has_gpu, reason="is about machines without a GPU")
def test_the_script_says_that_there_is_no_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_check.main([str(tmp_path / "out.json")]) == 2
    out = capsys.readouterr().out
    assert out == "This machine has no CUDA GPU, so nothing was checked.\n"
    assert list(tmp_path.iterdir()) == []


def test_the_script_reports_every_check(tmp_path, capsys, monkeypatch):
    def fails():
        raise AssertionError("3 is not 4")

    found = {"good": lambda: {"GB/s": 2.0}, "bad": fails}
    fake = SimpleNamespace(is_available=lambda: True, get_device_name=lambda i: "Fake")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpu_check, "checks", lambda: found)
    monkeypatch.setattr(gpu_check.torch, "cuda", fake)
    path = tmp_path / "out.json"
    assert gpu_check.main([str(path)]) == 1
    report = json.loads(path.read_text())
    assert (report["device"], report["torch"]) == ("Fake", torch.__version__)
    good, bad = report["checks"]["good"], report["checks"]["bad"]
    assert good["ok"] and good["GB/s"] == 2.0 and good["seconds"] >= 0
    assert not bad["ok"] and bad["error"] == "AssertionError: 3 is not 4"
    del found["bad"]
    assert gpu_check.main([str(path)]) == 0
    late = gpu_check.run({"late": fails}, budget=0)["late"]
    assert late == {"ok": False, "error": "no time was left for it"}
