import pytest

from actors.chat.report import chat_report
from actors.chat.turns import Turns
from cluster.contracts.errors import ConfigError, DataError
from tests.models import make_tokenizer
from tests.unit.actors.chat.families import FAMILIES, TEMPLATES, report_of, with_two_templates

DROPPED = "earlier reasoning is dropped"
BEGINS = "the beginning of a turn is written otherwise than it was prompted"
MOVED = "tools move to the last user's message"

# name: stop token, generation prompt, system role, tools, several answers, what is rewritten
EXPECTED = {
    "chatml": ("<|im_end|>", "<|im_start|>assistant\n", True, False, False, None),
    "cohere": ("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", True, False, False, None),
    "deepseek": ("<｜end▁of▁sentence｜>", "<｜Assistant｜>", True, True, True, None),
    "deepseek_r1": ("<｜end▁of▁sentence｜>", "<｜Assistant｜><think>\n", True, False, False, DROPPED),
    "echo": (None, "<|im_start|>assistant: ", True, False, False, None),
    "falcon": (None, "\nFalcon:", True, False, False, None),
    "gemma": ("<end_of_turn>", "<start_of_turn>model\n", False, False, False, None),
    "gemma_calls": ("<end_of_turn>", "<start_of_turn>model\n", True, True, True, None),
    "glm4": ("<|user|>", "<|assistant|>", True, True, True, None),
    "glm45": ("<|user|>", "<|assistant|>", True, True, True, DROPPED),
    "granite": ("<|end_of_text|>", "<|start_of_role|>assistant<|end_of_role|>", True, True, True, None),
    "harmony": (None, "<|start|>assistant", True, True, True, DROPPED),
    "hermes": ("<|im_end|>", "<|im_start|>assistant\n", True, True, True, None),
    "llama2": ("</s>", "", True, False, False, None),
    "llama3": ("<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", True, False, False, None),
    "llama31": ("<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", True, True, True, None),
    "ministral": ("</s>", "", True, True, True, None),
    "mistral": ("</s>", "", False, True, True, MOVED),
    "nemotron": ("<SPECIAL_12>", "<SPECIAL_11>Assistant\n<think>\n", True, True, True, DROPPED),
    "olmo": ("<|endoftext|>", "<|assistant|>\n", True, False, False, None),
    "phi3": ("<|end|>", "<|assistant|>\n", True, False, False, None),
    "phi4": ("<|im_end|>", "<|im_start|>assistant<|im_sep|>", True, True, True, None),
    "pythonic": ("<|im_end|>", "<|im_start|>assistant\n", True, True, True, None),
    "qwen25": ("<|im_end|>", "<|im_start|>assistant\n", True, True, True, None),
    "qwen3": ("<|im_end|>", "<|im_start|>assistant\n", True, True, True, DROPPED),
    "qwen35": ("<|im_end|>", "<|im_start|>assistant\n<think>\n", True, True, True, DROPPED),
    "run_together": ("<|end_of_text|>", "<|start_of_role|>assistant<|end_of_role|>", True, True, True, None),
    "smollm": ("<|im_end|>", "<|im_start|>assistant\n<think>\n\n</think>\n", True, True, True, BEGINS),
    "vicuna": ("</s>", "ASSISTANT:", True, False, False, None),
    "zephyr": ("</s>", "<|assistant|>\n", True, False, False, None),
}


def test_every_template_here_has_a_family_and_says_in_one_line_what_it_does():
    files = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
    assert {*files} == {*FAMILIES} == {*EXPECTED}
    assert all(text.startswith("{#- ") and text.partition("\n")[0].endswith(" -#}") for text in files.values())


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_tells_what_each_template_does(name):
    found = report_of(name)
    assert (
        found.stop_token,
        found.generation_prompt,
        found.takes_system,
        found.why_no_tools is None,
        found.takes_several_answers,
        found.rewrites,
    ) == EXPECTED[name]
    assert (found.why_no_turns is None) is (name != "echo")
    assert found.cuts_cleanly and not found.unsplittable


def test_several_answers_are_tried_with_the_template_that_takes_tools():
    tokenizer = with_two_templates()
    assert chat_report(Turns(tokenizer, stop_token_ids=[tokenizer.eos_token_id])).takes_several_answers


def test_the_turns_close_ends_with_the_stop_token_or_before_the_next_words():
    assert report_of("llama2").turn_close == " </s>"
    assert report_of("nemotron").turn_close == "\n<SPECIAL_12>"
    assert report_of("glm4").turn_close == "<|user|>"
    assert report_of("harmony").turn_close == "<|end|><|start|>user<|message|>"


def test_tools_that_are_dropped_without_a_word_are_found():
    for name in ("llama3", "cohere", "phi3"):
        assert report_of(name).why_no_tools == "the chat template does not show tools to the model"


def test_what_is_not_exact_is_a_configuration_error_with_a_way_out():
    report_of("qwen3").require_turns()
    report_of("qwen3").require_tools()
    report_of("gemma").require_turns()
    with pytest.raises(ConfigError, match=r"^model\.chat_template: .*2 times; give another one"):
        report_of("echo").require_turns()
    with pytest.raises(
        ConfigError, match=r"does not show tools to the model; set it to a template with tools, or use none"
    ):
        report_of("gemma").require_tools()
    with pytest.raises(ConfigError, match=r"no parser can be made from the chat template"):
        report_of("pythonic").require_tools()


def test_a_template_that_takes_no_users_message_has_no_report():
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('never') }}")
    with pytest.raises(DataError, match="never"):
        chat_report(Turns(tokenizer, stop_token_ids=[1]))


def test_a_template_without_tokens_of_its_own_is_exact_too():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    found = chat_report(Turns(make_tokenizer(chat_template=template), stop_token_ids=[1]))
    assert (found.why_no_turns, found.stop_token, found.turn_close) == (None, None, "[user]")
