import gc
import importlib.metadata
import subprocess
import sys
import weakref

import pytest

from cluster.contracts.importing import importing, packages_distributions


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_what_is_imported_is_not_walked_meanwhile_and_is_old_afterwards():
    with importing():
        assert not gc.isenabled()
        made = Cycle()
    assert gc.isenabled()
    assert any(each is made for each in gc.get_objects(generation=2))


def test_what_was_there_can_still_be_collected():
    before = Cycle()
    gone = weakref.ref(before)
    with importing():
        pass
    del before
    gc.collect()
    assert gone() is None


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_imported_for_good_is_never_walked_again():
    # In a process of its own: this one keeps its objects.
    code = (
        "import gc\nfrom cluster.contracts.importing import importing_for_good\n"
        "with importing_for_good():\n    import decimal\n"
        "print(gc.get_freeze_count() > 1000, gc.isenabled())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert said.stdout.split() == ["True", "True"]


def test_the_quick_list_of_installed_packages_is_that_of_python():
    ours, pythons = packages_distributions(), importlib.metadata.packages_distributions()
    assert {name: sorted(found) for name, found in ours.items()}.items() <= {
        name: sorted(found) for name, found in pythons.items()
    }.items()
    assert pythons.keys() == ours.keys() or sys.version_info >= (3, 12)  # it lists what is no Python too
    with importing():
        assert importlib.metadata.packages_distributions is packages_distributions
    assert importlib.metadata.packages_distributions is not packages_distributions


def test_transformers_knows_as_many_models_where_it_lists_them_quickly():
    code = """
import contextlib, sys
from cluster.contracts.importing import importing
with importing() if sys.argv[1] == "quickly" else contextlib.nullcontext():
    import transformers.models
import transformers
for module in (transformers, transformers.models):
    print(sorted((name, sorted(names)) for name, names in module._import_structure.items()))
    print(sorted(module._class_to_module.items()))
    print(sorted((name, sorted(backends)) for name, backends in module._object_missing_backend.items()))
print(transformers.utils.import_utils.fetch__all__.__module__, file=sys.stderr)
"""
    commands = ([sys.executable, "-c", code, how] for how in ("quickly", "as ever"))
    quick, slow = (subprocess.run(each, capture_output=True, text=True, check=True, timeout=300) for each in commands)
    assert quick.stdout == slow.stdout and len(slow.stdout) > 100_000
    assert [each.stderr.split()[-1] for each in (quick, slow)] == [
        "cluster.contracts.importing",
        "transformers.utils.import_utils",
    ]


def test_tokenizers_alone_come_without_the_compiler_and_models_after_them_as_ever():
    """A model whose code comes from the hub gets its `generate` from what the tokenizers leave out."""
    code = """
import sys
from cluster.contracts.importing import tokenizers_alone
tokenizers_alone()
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
print("torch._dynamo" in sys.modules, "transformers.modeling_utils" in sys.modules)
tokenizers_alone()
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto import auto_factory
print(hasattr(AutoModelForCausalLM.from_config(transformers.LlamaConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)), "generate"))
class Own(PreTrainedModel):
    def prepare_inputs_for_generation(self): ...
print(hasattr(Own, "generate"), hasattr(auto_factory.add_generation_mixin_to_remote_model(Own), "generate"))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert said.stdout.split() == ["False", "False", "True", "False", "True"]
