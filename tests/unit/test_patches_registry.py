"""runtime.patches.registry: C functions of all kinds are replaced and restored."""

from dtrrun.runtime.patches.registry import Patches, use_extension


def test_a_class_method_in_c_gets_its_class(extension):
    """`torch.autograd.Function.apply` is such a method since PyTorch 2.15."""
    use_extension(extension)
    seen = []

    def counting(original):
        def fromkeys(cls, *args):
            seen.append(cls)
            return original(cls, *args)

        return fromkeys

    class Base(dict):
        pass

    Base.fromkeys = vars(dict)["fromkeys"]

    class Derived(Base):
        pass

    patches = Patches()
    patches.wrap(Base, "fromkeys", counting)
    assert type(Base.fromkeys("ab")) is Base
    assert type(Derived.fromkeys("ab", 1)) is Derived
    assert Derived().fromkeys("a") == {"a": None}
    kept = Derived.fromkeys
    assert seen == [Base, Derived, Derived]
    patches.undo()
    assert Derived.fromkeys("a") == kept("a") == {"a": None}
    assert seen == [Base, Derived, Derived]  # a method bound earlier still calls the original
    assert vars(Base)["fromkeys"] is vars(dict)["fromkeys"]
