"""Training does not import `torch._dynamo`, and programs do not notice (`dtrrun.boot.dynamo`)."""

PROGRAM = """
import copy, inspect, os, pickle, sys, traceback, warnings
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)

def train(optimizer, net):
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(torch.ones(4, 3)).square().sum()
        loss.backward()
        optimizer.step()
    return loss.item()

class Mine(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)

def fails():
    raise ValueError("in a closure")

warnings.simplefilter("always")
print(hasattr(torch.distributed, "fsdp"))  # before the first optimizer
before = torch.optim.SGD.step
for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, Mine):
    net = model()
    optimizer = make(net.parameters(), lr=0.1)
    print(make.__name__, train(optimizer, net), torch.is_grad_enabled())
for function in (before, torch.optim.SGD.step, torch.optim.SGD.zero_grad, torch.optim.Adam.add_param_group):
    print(function.__qualname__, inspect.signature(function), hash(inspect.getsource(function)))
for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
    again.load_state_dict(optimizer.state_dict())
    again.step()
    print(type(again), again.state_dict())
torch.optim.SGD([net.weight, net.weight], lr=0.1)  # its warning names a line
for error in (lambda: optimizer.step(fails), lambda: optimizer.add_param_group({"params": [net.weight]})):
    try:
        error()
    except ValueError as raised:
        entries = traceback.extract_tb(raised.__traceback__)
        print(raised, [(one.filename, one.lineno, one.name) for one in entries if one.name != "_fn"])

if not os.fork():
    from torch.distributed import checkpoint  # modules of PyTorch's that read each other's missing attributes
    print("imported:", "torch._dynamo" in sys.modules, file=sys.stderr)
    os._exit(0)
os.wait()
x = torch.ones(4, 3, requires_grad=True)
for need in (
    lambda: torch.distributed.fsdp.FullyShardedDataParallel,
    lambda: hasattr(torch.distributed, "nothing"),
    lambda: torch.compile(net, backend="eager")(x),
    lambda: torch.export.export(net, (x,)).module()(x),
    lambda: torch.utils.checkpoint.checkpoint(net, x),  # its warning names a line of Dynamo's
):
    sys.stdout.flush()
    if not os.fork():
        print(need())
        print(train(optimizer, net), before.__code__.co_names, [*vars(torch._compile)])
        print("__getattr__" in vars(torch.distributed), "torch._dynamo" in sys.modules)
        print(hasattr(torch.optim.SGD.zero_grad.__wrapped__, "__dynamo_disable"))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def test_a_program_sees_no_difference(program, plain, dtrrun):
    program("train.py", PROGRAM)
    seed = {"PYTHONHASHSEED": "0"}
    expected = plain("python", "train.py", env=seed)
    found = dtrrun("--quiet", "--budget", "1GB", "train.py", env=seed)
    assert (found.status, found.out) == (0, expected.out)
    assert "imported: True\n" in expected.err
    assert "imported: False\n" in found.err
    said = [line for line in found.err.splitlines() if not line.startswith(("dtrrun:", "imported:"))]
    assert said == [line for line in expected.err.splitlines() if not line.startswith("imported:")]
    assert sum("eval_frame.py" in line for line in said) == 1
