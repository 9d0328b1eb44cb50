"""dtrrun.runtime.cuda.timing"""

from fake_gpu import FakeGpu

from dtrrun.core.graph import Signature
from dtrrun.runtime.cuda import timing
from dtrrun.runtime.cuda.timing import Timer


def timed(timer, gpu, signature, ms, *, busy=True):
    """busy: the GPU has earlier work to do while the host launches this."""
    start, gpu.done, before = timer.begin(signature), not busy and gpu.done, gpu.done
    gpu.clock += ms
    if start is not None:
        timer.end(signature, start)
    gpu.done = before
    return start


def test_nothing_is_read_before_it_is_done():
    gpu = FakeGpu()
    timer, signature = Timer(gpu.event, gpu.home_stream, gpu.occupy), Signature(None, ())
    signature.cost = 7
    gpu.done = False
    timed(timer, gpu, signature, 0.5)
    timer.poll()
    assert (signature.cost, signature.timed) == (7, True)
    gpu.done = True
    timer.poll()
    assert (signature.cost, signature.timed) == (500_000, True)


def test_the_least_counts_and_replaces_the_models_figure():
    gpu = FakeGpu()
    timer, signature = Timer(gpu.event, gpu.home_stream, gpu.occupy), Signature(None, ())
    signature.cost = 1  # from the cost model: less than the measurement will be
    for ms in (0.5, 0.25, 0.75):
        timed(timer, gpu, signature, ms)
    timer.poll()
    assert signature.cost == 250_000


def test_the_time_of_a_launch_only_lowers_the_models_figure():
    """A GPU without work waits for the host between the two events."""
    gpu = FakeGpu()
    timer, signature = Timer(gpu.event, gpu.home_stream, gpu.occupy), Signature(None, ())
    found = []
    signature.cost = 300_000
    for ms, busy in ((0.5, False), (0.25, False), (0.75, True), (0.5, False), (0.5, True), (0.125, False)):
        timed(timer, gpu, signature, ms, busy=busy)
        timer.poll()
        found.append((signature.cost, signature.timed))
    assert found == [
        (300_000, False),
        (250_000, False),
        (750_000, True),
        (500_000, True),
        (500_000, True),
        (125_000, True),
    ]


def test_an_idle_gpu_gets_work_before_a_call_that_could_not_be_timed():
    gpu = FakeGpu()
    timer, signature = Timer(gpu.event, gpu.home_stream, gpu.occupy), Signature(None, ())
    occupied = []
    for calls, timed in ((0, False), (1, False), (2, False), (2, True)):
        signature.calls, signature.timed = calls, timed
        timer.begin(signature)
        occupied.append(gpu.occupied)
    assert occupied == [0, 1, 2, 2]


def test_events_are_used_again():
    gpu = FakeGpu()
    timer, signature = Timer(gpu.event, gpu.home_stream, gpu.occupy), Signature(None, ())
    made = []
    timer._new_event = lambda: made.append(gpu.event()) or made[-1]
    for _ in range(5):
        timed(timer, gpu, signature, 1)
        timer.poll()
    timer.dropped(timer.begin(signature))  # an operator that failed
    timed(timer, gpu, signature, 1)
    assert len(made) == 2


def test_a_gpu_that_is_far_behind_is_not_measured(monkeypatch):
    monkeypatch.setattr(timing, "MOST_PENDING", 2)
    gpu = FakeGpu()
    gpu.done = False
    timer = Timer(gpu.event, gpu.home_stream, gpu.occupy)
    started = [timed(timer, gpu, Signature(None, ()), 1) for _ in range(3)]
    assert [start is None for start in started] == [False, False, True]
