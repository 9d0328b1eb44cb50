"""Threads and forked processes."""

import _thread
import concurrent.futures
import multiprocessing.pool
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
from _thread import start_new_thread as started_before

import pytest
import torch
from programs import assert_same, bits, chain, check_stress, mlp
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as stacked

import dtrrun
from dtrrun.runtime.dispatch.signatures import Signatures
from tests.care import budget


@pytest.mark.parametrize("careful", [True, False])
def test_threads_train_in_one_session(careful):
    """Four models in four threads, each with its own generator, train as if one after another."""

    def work(seed, results, together=None):
        own = torch.Generator().manual_seed(seed)
        model = mlp(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2, generator=own)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses = []
        if together:
            together.wait()
        for _ in range(3):
            x = torch.randn(64, 32, generator=own)
            mask = torch.rand(64, 32, generator=own) > 0.3
            loss = (model(x) * mask).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        results[seed] = bits([losses, model, optimizer])

    expected, found = {}, {}
    for seed in range(4):
        work(seed, expected)
    with budget(1, over_budget="evict", careful=careful, verify=True) as session:
        together = threading.Barrier(4)
        threads = [threading.Thread(target=work, args=(seed, found, together)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(record.locks for record in session.ledger.versions.values()) == 0
        assert session.ledger.reserved_bytes == 0
        assert session.report()["evictions"] > 0
    assert session.report().get("mismatches", []) == []
    for seed in range(4):
        assert_same(expected[seed], found.get(seed, []), f"thread {seed}")


def test_threads_that_share_the_default_generator():
    """Each thread's draws depend on the order; that they come back with the same bits does not."""
    results = {}

    def work(name):
        kept = []
        for _ in range(40):
            x = torch.rand(64, 32)
            kept.append((x.tolist(), x, nn.functional.dropout(x, 0.5)))
        results[name] = kept

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with dtrrun.budget(1, over_budget="evict", verify=True) as session:
            threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(old)
    assert session.report()["evictions"] > 0
    assert session.report()["mismatches"] == []
    for kept in results.values():
        assert all(x.tolist() == seen for seen, x, _ in kept)


def test_nobody_else_has_a_turn_while_an_operator_draws():
    """The state of the generator from which it will be recomputed is that from which it draws."""
    with dtrrun.budget("1GB") as session:
        in_a_thread(lambda: torch.rand(4))
        for _ in range(10):
            thread = threading.Thread(target=torch.rand, args=(1_000_000,))
            thread.start()
            while thread.is_alive():
                with session.callbacks.lock:
                    assert session.ledger.reserved_bytes == 0  # what an operator that is under way reserves
                time.sleep(1e-4)


def test_a_tensor_made_in_one_thread_is_used_in_another():
    def program():
        made, used = [], []

        def make():
            made.extend(chain(torch.sin(torch.randn(64, 32))))

        def use():
            used.extend(x * 2 for x in made)

        for work in (make, use):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return made, used

    check_stress(program)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_has_every_tensor():
    model = mlp(3)
    x = torch.randn(64, 32)
    expected = bits([model(x), chain(x)])
    read, write = os.pipe()
    with dtrrun.budget(1, over_budget="evict") as session:
        y, kept = model(x), chain(x)
        assert session.report()["evicted_bytes"] > 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            code = 1
            try:
                mode = torch.utils._python_dispatch._get_current_dispatch_mode()
                same = bits([y, kept]) == expected == bits([model(x), chain(x)])
                loud = y.sum() * 2
                loud.backward()
                with dtrrun.budget(1, over_budget="evict"):
                    again = bits([model(x), chain(x)]) == expected
                code = 0 if same and again and mode is None and not session.running else 1
                os.write(write, repr((same, again, mode, session.running)).encode())
            except BaseException as error:
                os.write(write, repr(error).encode())
            finally:
                os._exit(code)
        os.close(write)
        _, status = os.waitpid(child, 0)
        told = os.read(read, 1000)
        assert bits([y, kept]) == expected
        (y.sum() * 2).backward()
        assert session.running
    assert status == 0, told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_data_loader_workers():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return torch.full((16,), float(index)).sin(), table[index] * 2

    table = torch.arange(32.0)[:, None].expand(32, 16).cos()

    def program():
        table[:] = torch.sin(torch.arange(32.0))[:, None]
        loader = torch.utils.data.DataLoader(Data(), 8, num_workers=2, shuffle=True)
        return [[x * 2, y.exp(), x @ y.t()] for x, y in loader]

    check_stress(program)


def test_threads_that_write_to_rows_of_one_tensor():
    """A write makes a new version: the memory stays while another thread's operator, which locked the old
    version, uses it, and no recipe leaves out what the other thread has written."""

    def program():
        rows, matrix = torch.zeros(2, 50_000) + 1, torch.eye(200)
        kept = [matrix]

        def work(row):
            for step in range(20):
                rows[row].add_(step + row)
                kept.append((matrix @ matrix).sin())

        threads = [threading.Thread(target=work, args=(row,)) for row in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            kept.append(kept[-1] @ matrix)
        for thread in threads:
            thread.join()
        return rows

    expected = program()
    for _ in range(5):
        with dtrrun.budget("2MB", over_budget="evict") as session:
            rows = program()
            assert torch.equal(rows, expected)
            assert session.report()["evictions"] > 0
        assert torch.equal(rows, expected)


def test_what_is_half_written_is_not_read_by_a_replay_of_another_thread():
    """Until an in-place operator has ended, the ledger takes its memory for the version before."""
    with dtrrun.budget("1GB") as session:
        in_a_thread(lambda: torch.ones(4) + 1)
        for step in range(20):
            base = torch.zeros(10_000_000) + step
            kept = base[::1000] * 3
            thread = threading.Thread(target=base.add_, args=(100,))
            assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(kept))
            thread.start()
            time.sleep(step * 1e-4)
            found = kept + 0
            thread.join()
            assert torch.equal(found, torch.full((10_000,), step * 3.0))


def test_several_threads_ask_nothing(extension):
    def work():
        x = torch.ones(64, 64)
        for _ in range(500):
            x = torch.tanh(x @ x)

    with dtrrun.budget("1GB") as session:
        work()
        in_a_thread(work)
        assert session.callbacks.shared
        before = sum(session.interposer.python_calls.values())
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        assert sum(session.interposer.python_calls.values()) - before < 20  # at most the first of each thread
        assert sum(session.interposer.native_calls.values()) > 5_000


@pytest.mark.parametrize("budget", ["7MB", "11MB"])
def test_long_kernels_of_several_threads_inside_a_small_budget(budget):
    """What a thread's kernel reads is not evicted, restored or overwritten by other threads meanwhile."""
    shared = torch.randn(256, 256, generator=torch.Generator().manual_seed(9)) / 16

    def work(seed, results):
        own = torch.Generator().manual_seed(seed)
        kept = [torch.randn(256, 256, generator=own)]
        weight = torch.randn(256, 256, generator=own) / 16
        for step in range(30):
            x = torch.tanh(kept[-1] @ shared) + kept[step // 2].mul(0.5)
            x.add_(kept[step // 3] @ weight)
            if step % 7 == 0:
                x = torch.nn.functional.dropout(x, 0.0) + torch.rand(256, 256, generator=own)
            if step % 10 == 0:
                weight.mul_(0.9)  # a constant
            kept.append(x)
        results[seed] = bits(kept)

    expected, found = {}, {}
    for seed in range(3):
        work(seed, expected)
    with dtrrun.budget(budget, over_budget="evict") as session:
        threads = [threading.Thread(target=work, args=(seed, found)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.report()["evictions"] > 0
        assert sum(version.locks for version in session.ledger.versions.values()) == 0
        assert session.ledger.reserved_bytes == 0
    for seed in range(3):
        assert_same(expected[seed], found[seed], f"thread {seed}")


def test_who_has_waited_for_a_turn_looks_again_whether_care_is_needed(extension):
    """Another thread may have given up its turn meanwhile, and use what is about to change."""
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4) + 1
        in_a_thread(lambda: kept + 1)
        begun, asked = threading.Event(), []
        look = session.callbacks.before_operator
        session.callbacks.before_operator = lambda *given: asked.append(given) or look(*given)

        def work():
            begun.set()
            kept.add_(1)

        thread = threading.Thread(target=work)
        with session.callbacks.lock:
            thread.start()
            begun.wait()
            time.sleep(0.1)  # until it waits
            session.callbacks.turns.away.append((0, ()))
            session.callbacks.reasons.add("a test")
        thread.join()
        session.callbacks.turns.away.clear()
        assert len(asked) == 1


def test_an_operator_that_fails_beside_others_leaves_nothing_locked():
    def work(failures):
        x = torch.ones(300, 300)
        for size in range(2, 12):
            kept = x * size
            try:
                kept @ torch.ones(size, 4)
            except RuntimeError:
                failures.append(size)
            assert torch.equal(kept, torch.full((300, 300), float(size)))

    with dtrrun.budget("2.3MB") as session:  # what three operators take at once
        in_a_thread(lambda: torch.ones(4) + 1)
        found = [[] for _ in range(3)]
        threads = [threading.Thread(target=work, args=(one,)) for one in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [list(range(2, 12))] * 3
        assert session.ledger.reserved_bytes == 0
        assert sum(version.locks for version in session.ledger.versions.values()) == 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer's signals")
def test_interrupts_while_threads_take_turns():
    """Wherever one arrives, each operator has run or not, and no thread waits for a lock forever."""

    class Interrupt(Exception):
        pass

    def interrupt(*_):
        raise Interrupt

    def beside():
        y = torch.ones(200, 200)
        while not stop:
            y = torch.tanh(y @ y).mul_(0.5)

    stop, interrupts = [], 0
    before = signal.signal(signal.SIGALRM, interrupt)
    with dtrrun.budget("64MB") as session:
        threads = [threading.Thread(target=beside) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for step in range(300):
                x = torch.full((200, 200), float(step))
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 + step * 1e-5)
                    for _ in range(20):
                        x = x @ torch.eye(200)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    interrupts += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert torch.equal(x, torch.full((200, 200), float(step)))
        finally:
            signal.signal(signal.SIGALRM, before)
            stop.append(True)
            for thread in threads:
                thread.join(60)
        assert interrupts > 0
        assert not any(thread.is_alive() for thread in threads)
        assert session.ledger.reserved_bytes == 0
        assert sum(version.locks for version in session.ledger.versions.values()) == 0


def test_a_thread_waits_for_the_room_that_anothers_operator_has():
    """Both together exceed the budget, one after the other does not."""
    n = 1500

    def work(results):
        for _ in range(8):
            x = torch.ones(n, n)
            y = x @ x
            results.append(float(y[0, 0]))
            del x, y

    with dtrrun.budget(6 * n * n * 4, return_memory="auto") as session:
        found = [[] for _ in range(3)]
        threads = [threading.Thread(target=work, args=(one,)) for one in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert session.report()["peak_bytes"] <= session.ledger.budget_bytes
    assert found == [[float(n)] * 8] * 3


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_from_a_threads_first_operator_on_the_short_cut_is_not_taken():
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4) + 1
        in_a_thread(lambda: None)
        assert not session.callbacks.shared
        in_a_thread(lambda: kept + 1)
        assert session.callbacks.shared


def test_from_a_threads_first_access_on_the_short_cut_is_not_taken():
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4) + 1
        in_a_thread(kept.data_ptr)
        assert session.callbacks.shared
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4) + 1
        storage = kept.untyped_storage()
        in_a_thread(lambda: storage.resize_(8))
        assert session.callbacks.shared


def test_a_data_loaders_own_threads_touch_nothing():
    with dtrrun.budget("1GB") as session:
        data = torch.utils.data.TensorDataset(torch.randn(32, 8))
        for (x,) in torch.utils.data.DataLoader(data, 8, num_workers=1):
            x * 2
        assert not session.callbacks.shared


def test_a_thread_that_outlives_the_session():
    go_on, kept, results = threading.Event(), torch.ones(64), []

    def work():
        results.append(kept * 2)
        go_on.wait()
        results.append(results[0] * 2)

    thread = threading.Thread(target=work)
    with dtrrun.budget(1, over_budget="evict") as session:
        thread.start()
        while not results:
            time.sleep(0.001)
        operators = session.ledger.age
    go_on.set()
    thread.join()
    assert torch.equal(results[1], torch.full((64,), 4.0))
    assert session.ledger.age == operators > 0


def test_a_session_ends_only_when_nobody_is_in_the_ledger():
    """A thread in the middle of an eviction may be in any part of the ledger."""
    told, inside, go_on = [], threading.Event(), threading.Event()

    def work():
        with session.callbacks.lock:
            inside.set()
            go_on.wait(10)
            told.append("thread")

    with dtrrun.budget("1GB") as session:
        torch.ones(3) + 1
        set_budget = session.ledger.set_budget
        session.ledger.set_budget = lambda size: (told.append("end"), set_budget(size))
        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(10)
        threading.Timer(0.2, go_on.set).start()
    thread.join()
    assert told == ["thread", "end"]


def test_the_mode_comes_off_in_threads_too():
    """`mode_checks`: formulas that compute other bits under any mode, in a thread's backward pass."""

    def work():
        torch.manual_seed(0)
        x = (torch.rand(7, 7) - 0.5).requires_grad_()
        hidden = [torch.tanh(x * 1.5) for _ in range(4)]
        (gradient,) = torch.autograd.grad(sum(one.prod(1).abs().sum() for one in hidden), [x])
        results.append(bits(gradient))

    results = []
    work()
    with dtrrun.budget(1, over_budget="evict"):
        in_a_thread(work)
    assert_same(results[0], results[1], "in a thread")


class OwnBootstrap(threading.Thread):
    """Runs its target before the first Python code that other threads run."""

    def _bootstrap(self):
        self._target()
        self._target = None
        super()._bootstrap()


class Waiting:
    """A thread that began before the session, and waits in a different place in each case."""

    def __init__(self, wait):
        self.work = self.error = None
        self.go, self.done = threading.Lock(), threading.Event()
        self.go.acquire()
        self.stop = False
        self.thread = threading.Thread(target=wait, args=(self,))
        self.thread.start()
        time.sleep(0.01)

    def __call__(self, work):
        self.work = work
        self.stop = True
        self.go.release()
        assert self.done.wait(60)
        self.thread.join()


def waits_in_c(waiting):
    waiting.go.acquire()
    waiting.work()
    waiting.done.set()


def waits_in_python(waiting):
    while not waiting.stop:
        pass
    waiting.work()
    waiting.done.set()


def waits_in_a_mode(waiting):
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        waiting.go.acquire()
        waiting.work()
    assert stacked() == []
    waiting.done.set()


def waits_under_a_tracer(waiting):
    def trace(*_):
        return trace

    sys.settrace(trace)
    waiting.event = threading.Event()
    waiting.event.wait(0.05)
    waits_in_python(waiting)
    sys.settrace(None)


def by_thread(start):
    def run(work):
        done = threading.Event()
        start(lambda: (work(), done.set()), ())
        assert done.wait(60)

    return run


def by_class(cls):
    def run(work):
        done = threading.Event()
        cls(target=lambda: (work(), done.set())).start()
        assert done.wait(60)

    return run


def by_pool(pool):
    return lambda work: pool.submit(work).result(60)


def by_thread_pool(pool):
    return lambda work: pool.apply(work)


def warm(pool):
    pool.submit(int).result()
    return pool


WAYS = {
    "_thread": lambda: by_thread(lambda *args: _thread.start_new_thread(*args)),
    "_thread, imported by name": lambda: by_thread(lambda *args: started_before(*args)),
    "overridden _bootstrap": lambda: by_class(OwnBootstrap),
    "waits in C": lambda: Waiting(waits_in_c),
    "waits in Python": lambda: Waiting(waits_in_python),
    "waits in a mode": lambda: Waiting(waits_in_a_mode),
    "waits under a tracer": lambda: Waiting(waits_under_a_tracer),
    "executor": lambda: by_pool(warm(concurrent.futures.ThreadPoolExecutor(1))),
    "pool": lambda: by_thread_pool(multiprocessing.pool.ThreadPool(1)),
}
"""Each makes, before the session, something that runs a function in a thread inside the session."""


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS.keys())
def test_what_any_thread_writes_is_not_lost(make):
    """The next eviction would undo an unseen write; an unseen read finds nothing there."""

    def program(run):
        x = torch.sin(torch.randn(64, 32))
        read = []

        def work():
            x.add_(1).mul_(2)
            read.append((x * 3).sum().item())

        run(work)
        kept = chain(x)
        return x, read, kept, [one * 2 for one in kept]

    torch.manual_seed(7)
    expected = bits(program(make()))
    for budget_bytes in (1, 60_000):
        run = make()
        torch.manual_seed(7)
        with dtrrun.budget(budget_bytes, over_budget="evict", verify=True) as session:
            result = program(run)
            inside = bits(result)
            assert session.report()["evictions"] > 0
        assert session.report()["mismatches"] == []
        assert_same(expected, inside, "inside")
        assert_same(expected, bits(result), "afterwards")


def test_a_thread_that_never_wakes_keeps_nothing_of_sessions():
    from dtrrun.runtime.dispatch import visits

    waiting = Waiting(waits_in_c)
    before = {thread: len(calls) for thread, (calls, _) in visits._awaited.items()}
    for _ in range(5):
        with dtrrun.budget("1GB"):
            pass
    after = {thread: len(calls) for thread, (calls, _) in visits._awaited.items()}
    assert all(count <= before.get(thread, 0) for thread, count in after.items())
    waiting(lambda: None)


def test_an_error_in_a_thread_is_told_as_without_a_session(monkeypatch):
    def failing(x, *, y):
        raise ValueError(x + y)

    def told():
        found, done = [], threading.Event()

        def hook(args):
            lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
            found.append((args.err_msg, repr(args.object), lines))
            done.set()

        with monkeypatch.context() as patch:
            patch.setattr(sys, "unraisablehook", hook)
            _thread.start_new_thread(failing, (1,), {"y": 2})
            assert done.wait(60)
        for wrong in ((None, ()), (failing, 1), (failing, (), 1), (failing,)):
            with pytest.raises(TypeError) as caught:
                _thread.start_new_thread(*wrong)
            found.append(str(caught.value))
        _thread.start_new_thread(sys.exit, ())  # ends the thread silently
        return found

    expected = told()
    with dtrrun.budget("1GB"):
        assert told() == expected


LATE = """
import threading, time, sys
results = {{}}
together = threading.Event()

def come():
    import torch
    native = sys.modules.get("_dtrrun_native")
    return int(bool(native and native.is_on()))

def early():
    together.wait()
    results["early"] = come()

def importing():
    import torch
    results["importing"] = torch.randn(3).shape

other = threading.Thread(target=early)
other.start()
thread = threading.Thread(target=importing)
thread.start()
thread.join()
import torch
import dtrrun.runtime as runtime
session = runtime._active
assert session.running
results["main"] = come()
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
loss = model(torch.randn(256, 256)).square().mean()
loss.backward()
together.set()
other.join()
report = session.report()
assert report["evictions"] > 0, report
assert report["peak_bytes"] <= {budget}
assert results["early"] == results["main"] == 1, results
print("fine", session.callbacks.home_thread == threading.main_thread().ident)
"""


def test_torch_imported_first_in_a_thread(tmp_path):
    """Operators of the main thread, and of all others running by then, come to the session too."""
    program = tmp_path / "late.py"
    program.write_text(textwrap.dedent(LATE).format(budget=5_000_000))
    done = subprocess.run(
        f"{sys.executable} -m dtrrun --device cpu --budget 5MB {program}".split(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "fine" in done.stdout


def test_a_session_ends_beneath_a_mode_of_the_program_and_in_another_thread():
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def session():
        with dtrrun.budget(1, over_budget="evict"):
            yield chain(torch.randn(64, 32))

    before = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    turns = session()
    kept = next(turns)
    with Mode() as mode:
        assert next(turns, None) is None
        assert stacked() == [mode]
    assert stacked() == []
    turns = session()
    kept += next(turns)
    in_a_thread(lambda: next(turns, None))
    assert stacked() == []
    assert torch.utils._python_dispatch.is_in_torch_dispatch_mode() == before
    assert bits([one + 1 for one in kept])


FORKS = {
    "in a mode of the program": False,
    "in a thread, in a mode": True,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("threaded", FORKS.values(), ids=FORKS.keys())
def test_fork_in_a_mode_of_the_program(threaded):
    class Doubling(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return func(result, result) if func is torch.ops.aten.add.Tensor else result

    def forking():
        with Doubling() as mode:
            kept = chain(torch.randn(64, 32))
            expected = bits([kept, kept[3] + kept[4]])
            read, write = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                child = os.fork()
            if child == 0:
                told = b"failed"
                try:
                    inside = stacked() == [mode] and bits([kept, kept[3] + kept[4]]) == expected
                    mode.__exit__(None, None, None)
                    on = torch.utils._python_dispatch.is_in_torch_dispatch_mode() != before
                    told = repr((inside, stacked(), on)).encode()
                finally:
                    os.write(write, told)
                    os._exit(0)
            os.close(write)
            os.waitpid(child, 0)
            results.append(os.read(read, 1000))
            assert bits([kept, kept[3] + kept[4]]) == expected

    results = []
    before = torch.utils._python_dispatch.is_in_torch_dispatch_mode()  # for the whole process
    with dtrrun.budget(1, over_budget="evict") as session:
        in_a_thread(forking) if threaded else forking()
        assert session.report()["evictions"] > 0
    assert results == [b"(True, [], False)"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_while_another_thread_is_in_the_ledger():
    """The child's ledger is consistent: a fork waits until no thread is in it, and keeps others out."""
    stop = threading.Event()
    kept = []

    def work():
        while not stop.is_set():
            for one in kept:
                one * 2

    with dtrrun.budget(40_000, over_budget="evict"):
        kept += chain(torch.randn(64, 32), 12)
        expected = bits(kept)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(10):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        code = 0 if bits(kept) == expected and stacked() == [] else 2
                    finally:
                        os._exit(code)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_thread_runs_its_first_operator_while_another_forks():
    """It takes a lock of PyTorch's for a moment. The child would wait for it in each new thread, for ever."""
    begun = threading.Event()
    with dtrrun.budget("1GB") as session:
        session._before_fork()
        session._lock.release()
        _thread.start_new_thread(begun.set, ())
        assert not begun.wait(0.2)
        session._lock.acquire()
        session._after_fork_in_parent()
        assert begun.wait(10)


def test_a_visit_may_find_a_thread_as_it_is_switched_on():
    with dtrrun.budget("1GB") as session:
        threads = session.interposer.threads
        entered = threading.Event()

        def visited():
            with threads.entering:  # as in `enter`, which the visit calls again
                threads._native.switch(False)
                threads.enter()
            entered.set()

        threading.Thread(target=visited, daemon=True).start()
        assert entered.wait(10)


@pytest.mark.parametrize("call", ["seed and draw", "state"])
def test_a_replay_in_another_thread_leaves_the_programs_generator_alone(call):
    """Seeding a generator, or reading its state, is not an operator."""

    def program():
        torch.manual_seed(1)
        x, found, ended = torch.ones(200, 200), set(), threading.Event()
        drops = [torch.nn.functional.dropout(x, 0.5) for _ in range(60)]

        def read():
            for _ in range(8):
                sum((drop * 2).sum() for drop in drops)
            ended.set()

        reader = threading.Thread(target=read)
        reader.start()
        while not ended.wait(1e-4):  # or else this thread may keep the GIL for itself
            if call == "state":
                found.add(bytes(torch.get_rng_state()[:5000].tolist()))
            else:
                torch.manual_seed(5)
                found.add(tuple(torch.rand(4).tolist()))
        reader.join()
        return found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with dtrrun.budget(2_000_000, over_budget="evict") as session:
            found = program()
    finally:
        sys.setswitchinterval(interval)
    assert session.report()["rematerializations"] > 60
    assert len(found) == 1


def test_a_step_ends_while_another_thread_meets_new_signatures(monkeypatch):
    """The table of signatures must not grow while the end of a step iterates over it."""
    held = []

    def measure_again(signatures, original=Signatures.measure_again):
        held.append(session.callbacks.lock._is_owned())
        original(signatures)

    monkeypatch.setattr(Signatures, "measure_again", measure_again)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    with dtrrun.budget("1GB") as session:
        (weight * 2).sum().backward()
        optimizer.step()
    assert held
    assert all(held)


def test_a_thread_uses_its_device_again_once_it_has_its_turn_back():
    """Of several GPUs, another thread may have used another one meanwhile."""
    with dtrrun.budget("1GB") as session:
        lock, ledger, ended = session.callbacks.lock, session.ledger, session._operator_ended
        turns = session.callbacks.turns

        def use_another():
            with lock:
                ledger.use(1)
                ended.notify_all()

        with lock:
            threading.Thread(target=use_another).start()
            assert turns.wait(60)
            assert ledger.device == 0
            with turns.given_up():
                other = threading.Thread(target=use_another)
                other.start()
                other.join()
            assert ledger.device == 0
        with ledger.on(1):
            assert lock._is_owned()


VIEWS = """
import faulthandler, sys, threading, torch, dtrrun

faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-5)
ended = []
x = torch.randn(20, 20, dtype=torch.complex64, requires_grad=True)

def compute():
    z = torch.ones(150, 150)
    while not ended:
        z = torch.tanh(z @ z)
        z.mul_(0.5)

def ask():
    together.wait()
    for view in views:
        view.grad_fn.name()

with dtrrun.budget("64MB"):
    computing = [threading.Thread(target=compute) for _ in range(2)]
    for thread in computing:
        thread.start()
    for _ in range(150):
        y = x * 2
        views = [torch.view_as_real(y) for _ in range(10)]
        y.mul_(1.5)
        together = threading.Barrier(2)
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    ended.append(True)
    for thread in computing:
        thread.join()
print("done")
"""


def test_threads_ask_a_view_how_it_was_made():
    """PyTorch runs the view again while it holds a mutex of the tensor."""
    run = subprocess.run([sys.executable, "-c", VIEWS], capture_output=True, text=True, timeout=100)
    assert run.stdout == "done\n", run.stderr


def test_a_session_ends_while_other_threads_compute():
    """What they read is back before their operators stop coming to the session."""
    stop, wrong = threading.Event(), []

    def work(kept, expected):
        while not stop.is_set():
            for one, value in zip(kept, expected, strict=True):
                if (found := (one * 2).sum().item()) != value:
                    wrong.append((found, value))

    for _ in range(20):
        stop.clear()
        with dtrrun.budget(60_000, over_budget="evict") as session:
            kept = chain(torch.randn(64, 32), 12)
            expected = [(one * 2).sum().item() for one in kept]
            threads = [threading.Thread(target=work, args=(kept, expected)) for _ in range(2)]
            for thread in threads:
                thread.start()
            time.sleep(0.02)
            assert session.report()["evictions"] > 0
        time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
