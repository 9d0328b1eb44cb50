"""Weights, gradients and optimizer state leave for the host, and what takes long to recompute: same bits."""

import copy
import io
import os
import resource
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from programs import assert_same, batch, bits, mlp, outcome, plain, run_inside, train
from torch import nn
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
)
from torch.utils._pytree import tree_map_only

import dtrrun
from dtrrun.core.host import ALWAYS, NEVER

WIDTH = 128
KINDS = {
    "each": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
}
DEPTH = 6
WEIGHTS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4


def trained(make, steps=3):
    model = mlp(DEPTH, WIDTH)
    return train(model, lambda: batch(16, WIDTH), make(list(model.parameters())), steps)


def constant():
    return torch.tensor([[1.0] * 64] * 64)


@contextmanager
def evicting(folder, *, results_leave, host="100MB"):
    """Begin a session that evicts all that it can, constants too."""
    with dtrrun.budget(1, over_budget="evict", host_budget=f"{host}:{folder}") as session:
        session.ledger.results_leave = results_leave
        session.ledger.let_constants_leave()
        yield session


def descriptors(folder):
    """Return how many files in a folder this process has open."""
    links = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists the others
            links.append(os.readlink(one))
    return sum(str(folder) in link for link in links)


def check_below_its_state(program, budget_bytes, folder, *, state_bytes):
    """Check that a program runs in less than its state takes, and that it does not without the tier."""
    assert budget_bytes < state_bytes
    expected = plain(program)
    with pytest.raises(dtrrun.BudgetError, match="--host-budget"):
        run_inside(program, budget_bytes, careful=False)
    for careful in (False, True):
        # `verify` compares each storage with what has left.
        with dtrrun.budget(budget_bytes, verify=True, host_budget=f"100MB:{folder}") as session:
            if careful:
                session.callbacks.reasons.add("a test")
            found = outcome(program)[1]
            report = session.report()
        assert_same(expected, found, f"careful={careful}")
        assert report["mismatches"] == []
        assert report["verified"] > 0
        assert report["peak_bytes"] <= budget_bytes
        assert 0 < report["left_peak_bytes"] <= report["host_peak_bytes"] <= report["host_budget_bytes"]
        assert min(report["copies_out"], report["copies_in"]) > 0
    return report


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers(kind, tmp_path):
    """Lists with all weights and states are split into parts that fit."""
    states = 2 + (kind not in ("sgd", "adagrad")) + (kind == "amsgrad")
    size = (2 + states) * WEIGHTS
    check_below_its_state(lambda: trained(KINDS[kind]), size // 2, tmp_path, state_bytes=size)


def test_parts_of_lists_compute_what_the_lists_do(tmp_path):
    """PyTorch's own database of operators on lists, each place of the lists by itself."""
    split = set()
    for op in (*foreach_unary_op_db, *foreach_binary_op_db, *foreach_pointwise_op_db, *foreach_reduce_op_db):
        for call in (op.method_variant, op.inplace_variant):
            samples = op.sample_inputs(
                "cpu", torch.float32, num_input_tensors=[3], allow_higher_dtype_scalars=True
            )
            for number, sample in enumerate(samples if call is not None else ()):
                given = sample.input, sample.args, {k: v for k, v in sample.kwargs.items() if k != "values"}
                expected, _ = applied(call, given)
                if expected is None or number >= 6:
                    continue
                with dtrrun.budget(1, over_budget="evict", host_budget=f"100MB:{tmp_path}") as session:
                    session.ledger.least_copy_bytes = 1
                    session.ledger.let_constants_leave()
                    found, operators = applied(call, given, session)
                    assert_same(expected, found, op.name)
                    if operators == len(sample.input):
                        split.add(op.name)
    assert len(split) >= 35, sorted(split)


def applied(call, given, session=None):
    """Return the bits after a call on copies, None if it fails, and how many operators it was."""
    lists, args, kwargs = tree_map_only(torch.Tensor, torch.clone, given)
    torch.randn(64, 64).sin()  # makes room
    before = session.ledger.age if session else 0
    try:
        result = call(lists, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError):
        return None, 0
    operators = session.ledger.age - before if session else 0
    return bits([result, lists]), operators


def test_clipping_scaling_averages_and_accumulation(tmp_path):
    def program():
        model = mlp(DEPTH, WIDTH)
        average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        norms = []
        for _ in range(3):
            for _ in range(2):
                inputs, targets = batch(16, WIDTH)
                scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
        return model, average, optimizer, norms, scaler.get_scale()

    check_below_its_state(program, 2 * WEIGHTS, tmp_path, state_bytes=5 * WEIGHTS)


def test_checkpoints(tmp_path):
    """Neither saving nor loading needs more than one storage in memory at a time, in either format."""

    def program(file):
        model = mlp(DEPTH, WIDTH)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        train(model, lambda: batch(16, WIDTH), optimizer, 2)
        for new in (True, False):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{file}{new}", _use_new_zipfile_serialization=new)
            del state
            train(model, lambda: batch(16, WIDTH), optimizer, 1)
            loaded = torch.load(f"{file}{new}")
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            del loaded
        return model, optimizer

    plain_file, file = (tmp_path / name / "run" for name in ("plain", "inside"))
    for one in (plain_file, file):  # an archive contains its file's name
        one.parent.mkdir()
    expected = plain(lambda: program(plain_file))
    with dtrrun.budget(3 * WEIGHTS, verify=True, host_budget=f"100MB:{tmp_path}") as session:
        found = outcome(lambda: program(file))[1]
        report = session.report()
    assert_same(expected, found, "with checkpoints")
    assert report["mismatches"] == []
    assert report["peak_bytes"] <= 3 * WEIGHTS
    assert report["left_peak_bytes"] > WEIGHTS
    assert Path(f"{file}True").read_bytes() == Path(f"{plain_file}True").read_bytes()


def test_a_block_brings_all_of_it_back(tmp_path):
    model = mlp(DEPTH, WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with dtrrun.budget(2 * WEIGHTS, host_budget=f"100MB:{tmp_path}") as session:
        train(model, lambda: batch(16, WIDTH), optimizer, 2)
        assert session.report()["left_bytes"] > 0
    tensors = [one for p in model.parameters() for one in (p, p.grad, *optimizer.state[p].values())]
    assert not any(torch.isnan(one).any() for one in tensors)
    assert all(one.untyped_storage().data_ptr() for one in tensors)


@pytest.mark.parametrize("first", [None, "40MB"])
def test_a_budget_that_is_set_once_operators_have_only_been_counted(first, tmp_path):
    """State may leave from then on, and so may gradients and others that have had no version until then."""

    def program(shrink=lambda: None):
        model = mlp(DEPTH, WIDTH)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for step in range(7):
            inputs, targets = batch(16, WIDTH)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            kept = [torch.full((WIDTH, WIDTH), float(one)) for one in range(DEPTH)]
            if step == 4:
                shrink()
            optimizer.step()
        return model, optimizer, kept

    def shrink():
        assert session.ledger.counting
        session.ledger.collect_dead()
        assert session.ledger.census_bytes > 1.8 * WEIGHTS
        session.set_budget(2 * WEIGHTS)
        assert session.ledger.resident_bytes <= 2 * WEIGHTS
        session.ledger.step_peak_bytes = 0

    expected = plain(program)
    with dtrrun.budget(first, host_budget=f"100MB:{tmp_path}") as session:
        found = outcome(lambda: program(shrink))[1]
        report = session.report()
        assert session.ledger.step_peak_bytes <= 2 * WEIGHTS
    assert_same(expected, found, "with a budget set later")
    assert report["left_peak_bytes"] > 3 * WEIGHTS
    assert min(report["copies_out"], report["copies_in"]) > 0


def test_no_state_leaves_while_something_else_can_be_evicted(tmp_path):
    """The tier that is there by default changes no decision at budgets that suffice without it."""

    def program():
        return trained(KINDS["each"])

    digests = []
    for host in ("none", f"100MB:{tmp_path}"):
        with dtrrun.budget(int(6 * WEIGHTS), cost="model", host_budget=host) as session:
            session.ledger.results_leave = NEVER
            outcome(program)
            report = session.report()
            assert report["copies_out"] == 0
            digests.append((session.ledger.decisions, session.ledger.digest))
    assert digests[0] == digests[1]


def test_memory_that_other_code_can_reach_stays(tmp_path):
    with evicting(tmp_path, results_leave=NEVER) as session:
        shared, read, pinned, written = (constant() for _ in range(4))
        array, address = shared.numpy(), read.data_ptr()
        session.pin(pinned)
        torch.randn(64, 64)  # makes room
        assert session.ledger.left_bytes == written.nbytes
        array[:] = 2
        assert read.data_ptr() == address
        assert shared.sum() == 2 * 64 * 64
        written.mul_(3)
        torch.randn(64, 64)
        assert written.sum() == 3 * 64 * 64


def test_a_copy_is_kept_until_the_content_changes(tmp_path):
    with evicting(tmp_path, results_leave=NEVER) as session:
        weight, made = constant(), []
        for value in (1.0, 2.0, 4.0):
            for _ in range(3):  # it only leaves and returns
                made.append(torch.randn(64, 64))
                assert weight.tolist() == [[value] * 64] * 64
            weight.mul_(2)
        report = session.report()
        assert (report["copies_out"], report["copies_in"]) == (3, 9)


# -- results -----------------------------------------------------------------------------------------


def test_results_leave_where_recomputing_them_takes_longer(tmp_path):
    """In a recurrent network, each hidden state needs all those before it."""

    def program():
        torch.manual_seed(0)
        cell, found = nn.GRUCell(64, 64), torch.zeros(32, 64)
        for _ in range(40):
            found = cell(found.sin(), found)
        found.sum().backward()
        return found, cell

    expected, work = plain(program), []
    for host in ("none", f"100MB:{tmp_path}"):
        with dtrrun.budget("700kB", cost="model", verify=True, host_budget=host) as session:
            assert_same(expected, outcome(program)[1], host)
            report = session.report()
            work.append(session.ledger.recomputed_cost + session.host.ns())
        assert report["mismatches"] == []
        assert report["peak_bytes"] <= 700_000
    assert min(report["copies_out"], report["copies_in"], report["evictions"]) > 0
    assert report["left_peak_bytes"] == 0  # no constant has left
    assert work[1] < work[0] / 2


def test_a_result_on_the_host_needs_no_inputs(tmp_path):
    with evicting(tmp_path, results_leave=ALWAYS) as session:
        x, weight = constant(), constant()
        y = x @ weight
        kept = y.tolist()
        torch.randn(64, 64)  # makes room
        copies_in = session.report()["copies_in"]
        weight.zero_()
        del x
        assert session.report()["copies_in"] <= copies_in + 1  # of the weight
        assert y.tolist() == kept
        assert session.report()["rematerializations"] == 0


def test_results_are_recomputed_where_the_host_is_full(tmp_path):
    def program():
        kept = [torch.ones(64, 64).sin()]
        for _ in range(20):
            kept.append(kept[-1].cos() @ kept[0])
        return kept

    expected = plain(program)
    with evicting(tmp_path, results_leave=ALWAYS, host="100kB") as session:
        assert_same(expected, outcome(program)[1], "a full host")
        report = session.report()
    assert report["host_peak_bytes"] <= 100_000
    assert min(report["copies_out"], report["rematerializations"]) > 0


# -- the host ----------------------------------------------------------------------------------------


def test_a_small_host_budget_is_kept(tmp_path):
    """Copies of what is in memory make room for others. What has no place stays."""
    size = 4 * WEIGHTS
    expected = plain(lambda: trained(KINDS["each"]))
    with dtrrun.budget(size * 3 // 4, host_budget=f"{size // 2}B:{tmp_path}") as session:
        assert_same(expected, outcome(lambda: trained(KINDS["each"]))[1], "half fits there")
        assert session.report()["host_peak_bytes"] <= size // 2
    with dtrrun.budget(size // 2, host_budget=f"{size // 8}B:{tmp_path}"), pytest.raises(dtrrun.BudgetError):
        trained(KINDS["each"])


def test_a_full_disk(tmp_path):
    """What can't be written stays in memory."""
    expected = plain(lambda: trained(KINDS["each"]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * WEIGHTS, before[1]))
    try:
        with dtrrun.budget(3 * WEIGHTS, verify=True, host_budget=f"100MB:{tmp_path}") as session:
            found = outcome(lambda: trained(KINDS["each"]))[1]
            report = session.report()
        assert_same(expected, found, "with a disk that is full")
        assert 0 < report["host_peak_bytes"] <= 2 * WEIGHTS
        with dtrrun.budget(WEIGHTS, host_budget=f"100MB:{tmp_path}"), pytest.raises(dtrrun.BudgetError):
            trained(KINDS["each"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_is_not_there(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match="not a folder"), dtrrun.budget("1GB", host_budget=f"1GB:{missing}"):
        pass
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint(torch.ones(2).sum().item())\n")
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "dtrrun",
            "--device",
            "cpu",
            "--budget",
            "1GB",
            "--host-budget",
            f"1GB:{missing}",
            script,
        ],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "not a folder" in ended.stderr


def test_no_file_remains(tmp_path):
    """The file has no name, so a process that is killed leaves nothing, and two runs do not meet."""
    with dtrrun.budget(2 * WEIGHTS, host_budget=f"100MB:{tmp_path}") as session:
        trained(KINDS["each"])
        assert session.report()["copies_out"] > 0
        assert list(tmp_path.iterdir()) == []
        assert descriptors(tmp_path) == 1


def test_files_from_before_a_fork_are_closed_once_no_copy_is_in_them(tmp_path):
    """A loader's workers are forked in every epoch."""
    with dtrrun.budget(2 * WEIGHTS, host_budget=f"100MB:{tmp_path}") as session:
        model = mlp(DEPTH, WIDTH)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(6):
            train(model, lambda: batch(16, WIDTH), optimizer, 1)
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
        assert session.report()["copies_out"] > 0
        assert 1 <= descriptors(tmp_path) <= 3
    assert session.report()["host_bytes"] == 0


def test_what_is_said_to_be_enough_to_keep_all_here_is_enough(tmp_path):
    def program():
        return trained(KINDS["each"])

    for budget_bytes in (3 * WEIGHTS, 2 * WEIGHTS):
        with dtrrun.budget(budget_bytes, host_budget=f"100MB:{tmp_path}") as session:
            outcome(program)
            enough = budget_bytes + session.report()["left_peak_bytes"]
        with dtrrun.budget(enough, host_budget=f"100MB:{tmp_path}") as session:
            outcome(program)
            assert session.report()["left_peak_bytes"] == 0


def test_the_advised_budget_has_room_for_the_largest_update_and_not_much_more(tmp_path):
    def program():
        model = nn.Sequential(nn.Linear(16, 4096), nn.Linear(4096, 4))
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        train(model, lambda: (torch.randn(2, 16), torch.randn(2, 4)), optimizer, 2)

    update, host = 3 * 4 * 16 * 4096, f"100MB:{tmp_path}"
    with pytest.raises(dtrrun.BudgetError) as raised, dtrrun.budget(update - 1000, host_budget=host):
        program()
    advised = raised.value.expected_bytes
    assert update < advised < 1.2 * update
    with dtrrun.budget(advised, host_budget=host) as session:
        program()
        assert session.report()["copies_in"] > 0


def test_a_forked_child_reads_what_has_left(tmp_path):
    """The parent goes on, and writes elsewhere meanwhile."""
    with dtrrun.budget(2 * WEIGHTS, host_budget=f"100MB:{tmp_path}") as session:
        model = mlp(DEPTH, WIDTH)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        train(model, lambda: batch(16, WIDTH), optimizer, 2)
        assert session.ledger.left_bytes > 0
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                sums = [
                    value.double().sum().item()
                    for p in model.parameters()
                    for value in optimizer.state[p].values()
                ]
                os.write(writer, repr(sums).encode())
            finally:
                os._exit(0)
        os.close(writer)
        before = [
            value.double().sum().item() for p in model.parameters() for value in optimizer.state[p].values()
        ]
        for _ in range(3):
            train(model, lambda: batch(16, WIDTH), optimizer, 1)
        with os.fdopen(reader, "rb") as pipe:
            assert eval(pipe.read()) == before
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_threads_that_train(tmp_path):
    def program():
        found = {}

        def work(number):
            generator = torch.Generator().manual_seed(number)
            model = mlp(DEPTH, WIDTH)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0, 0.05, generator=generator)
            optimizer = torch.optim.Adam(model.parameters(), foreach=True)
            make = lambda: (torch.randn(16, WIDTH, generator=generator), torch.zeros(16, WIDTH))  # noqa: E731
            found[number] = train(model, make, optimizer, 3)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return [found[number] for number in range(2)]

    expected = plain(program)
    with dtrrun.budget(5 * WEIGHTS, host_budget=f"100MB:{tmp_path}") as session:
        found = outcome(program)[1]
        assert session.report()["copies_in"] > 0
    assert_same(expected, found, "in two threads")


def test_pickles_and_copies(tmp_path):
    with dtrrun.budget(2 * WEIGHTS, host_budget=f"100MB:{tmp_path}") as session:
        run = trained(KINDS["each"])
        assert session.ledger.left_bytes > 0
        file = io.BytesIO()
        torch.save(run["model"], file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        other = copy.deepcopy(run["model"])
        for one, two, three in zip(
            run["model"].parameters(), again.parameters(), other.parameters(), strict=True
        ):
            assert torch.equal(one, two)
            assert torch.equal(one, three)
