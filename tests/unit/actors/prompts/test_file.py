import datetime
import hashlib
import json
import threading
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer

import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from actors.prompts.file import file
from cluster.contracts.errors import ConfigError, DataError

ROWS = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "2 + 2 =", "answer": "4"}]
MESSAGES = [{"role": "user", "content": "1 + 1"}]


def written(folder, text, name="prompts.jsonl"):
    path = folder / name
    path.write_text(text)
    return str(path)


def jsonl(folder, *rows):
    return written(folder, "".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(folder, table):
    pa.parquet.write_table(table, folder / "p.parquet")
    return str(folder / "p.parquet")


def as_feather(folder, table):
    pa.feather.write_feather(table, folder / "p.feather")
    return str(folder / "p.feather")


def as_stream(folder, table):
    with pa.ipc.new_stream(folder / "p.arrow", table.schema) as sink:
        sink.write_table(table)
    return str(folder / "p.arrow")


@pytest.mark.parametrize("write", [as_parquet, as_feather, as_stream])
def test_arrow_and_parquet_read_as_jsonl_does(tmp_path, write):
    binary = file(path=write(tmp_path, pa.Table.from_pylist(ROWS)))
    lines = file(path=jsonl(tmp_path, *ROWS))
    assert [(p.text, p.columns) for p in binary] == [(p.text, p.columns) for p in lines]


@pytest.mark.parametrize("write", [as_parquet, as_feather, as_stream])
def test_equal_rows_have_one_digest_and_another_answer_has_another(tmp_path, write):
    digest = file(path=jsonl(tmp_path, *ROWS)).digest
    assert file(path=write(tmp_path, pa.Table.from_pylist(ROWS))).digest == digest
    assert file(path=jsonl(tmp_path, ROWS[0], {**ROWS[1], "answer": "5"})).digest != digest


@pytest.mark.parametrize("write", [as_parquet, as_feather, as_stream])
def test_a_message_of_a_table_has_the_keys_of_its_row_alone(tmp_path, write):
    """Arrow gives every message the keys of all: templates took them for tool calls and images."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "and this?"}, {"type": "image", "image": "a.png"}]}
    rows = [{"prompt": [*MESSAGES, call]}, {"prompt": MESSAGES}], [{"prompt": [parts]}]
    for each in rows:
        binary = file(path=write(tmp_path, pa.Table.from_pylist(each)))
        assert [p.messages for p in binary] == [p.messages for p in file(path=jsonl(tmp_path, *each))]


def test_the_other_columns_go_with_the_prompt(tmp_path):
    prompt = file(path=jsonl(tmp_path, *ROWS))[1]
    assert (prompt.prompt_id, prompt.text, prompt.columns) == ("file/prompts.jsonl/1", "2 + 2 =", {"answer": "4"})


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_are_found_in_either_column(tmp_path, column):
    prompt = file(path=jsonl(tmp_path, {column: MESSAGES}))[0]
    assert (prompt.messages, prompt.text) == (MESSAGES, None)


@pytest.mark.parametrize(
    ("text_as", "text", "messages"),
    [
        ({}, "1 + 1 =", [{"role": "user", "content": "1 + 1 ="}]),
        ({"text_as": "text"}, "1 + 1 =", None),
        ({"text_as": "user_message"}, None, [{"role": "user", "content": "1 + 1 ="}]),
    ],
)
def test_a_text_is_left_to_the_models_template_unless_told_otherwise(tmp_path, text_as, text, messages):
    prompt = file(path=jsonl(tmp_path, *ROWS), **text_as)[0]
    assert (prompt.text, prompt.messages) == (text, messages)


@pytest.mark.parametrize("text_as", ["auto", "user_message"])
def test_with_a_system_prompt_a_text_is_the_users_message(tmp_path, text_as):
    prompt = file(path=jsonl(tmp_path, *ROWS), text_as=text_as, system_prompt="Be brief.")[0]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    assert (prompt.text, prompt.messages) == (None, said)


def test_a_json_list_reads_as_lines_do(tmp_path):
    path = written(tmp_path, json.dumps(ROWS), "prompts.json")
    assert [(p.text, p.columns) for p in file(path=path)] == [
        ("1 + 1 =", {"answer": "2"}),
        ("2 + 2 =", {"answer": "4"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"}\n', "prompts.json: not JSON: .*one object a line is named .jsonl"),
        ('[{"prompt": "a", "prompt": "b"}]', "prompts.json: 'prompt' is given twice in one object"),
        ('{"data": []}', "prompts.json: must be a list of rows, got dict"),
        ('[{"prompt": "a"}, "b"]', "prompts.json, row 1: a row must be an object, got str"),
    ],
)
def test_json_that_is_not_a_list_of_rows_is_named(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        file(path=written(tmp_path, text, "prompts.json"))


def test_a_column_of_another_name_can_be_the_prompt(tmp_path):
    prompt = file(path=jsonl(tmp_path, {"question": "why?", "prompt": "unused"}), column="question")[0]
    assert (prompt.text, prompt.columns) == ("why?", {"prompt": "unused"})


def test_dates_and_decimals_travel_as_text(tmp_path):
    row = {"prompt": "x", "on": datetime.date(2024, 2, 29), "cost": Decimal("1.50")}
    assert file(path=as_parquet(tmp_path, pa.Table.from_pylist([row])))[0].columns == {
        "on": "2024-02-29",
        "cost": "1.50",
    }


def test_a_url_reads_as_a_path_does(tmp_path):
    assert len(file(path=f"file://{jsonl(tmp_path, *ROWS)}")) == 2


def test_fsspec_serves_what_pyarrow_does_not(tmp_path):
    import fsspec

    with fsspec.open("memory://prompts.jsonl", "w") as sink:
        sink.write('{"prompt": "from memory"}\n')
    assert file(path="memory://prompts.jsonl")[0].text == "from memory"


class _Forbids(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(403)

    do_HEAD = do_GET

    def log_message(self, *_): ...


def test_a_url_that_cannot_be_read_says_why():
    """Seen before: all failures were a file that is not there."""
    with HTTPServer(("127.0.0.1", 0), _Forbids) as server:
        url = f"http://127.0.0.1:{server.server_port}/prompts.jsonl"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(ConfigError, match="cannot be read: 403, message='Forbidden'"):
            file(path=url)
        server.shutdown()
        thread.join()
    with pytest.raises(ConfigError, match=r"cannot be read: Cannot connect to host 127\.0\.0\.1"):
        file(path=url)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            '{"prompt": "a"}\n{"question": "b"}\n',
            r"prompts.jsonl, row 1: no 'messages' or 'prompt'; it has: question; .*prompts\.column=NAME",
        ),
        ('{"prompt": "a"}\nnot json\n', r"prompts.jsonl, line 2: not JSON"),
        ('{"prompt": "a"}\n\n{"prompt": "b", "prompt": "c"}\n', r"prompts.jsonl, line 3: 'prompt' is given twice"),
        (
            '{"prompt": [{"role": "user", "content": "a", "role": "b"}]}',
            r"prompts.jsonl, line 1: 'role' is given twice",
        ),
        ('{"prompt": "a"}\n[1]\n', r"prompts.jsonl, line 2: a row must be an object, got list"),
        ('{"prompt": "  "}\n', r"row 0, column 'prompt': the text is empty"),
        ('{"prompt": 7}\n', r"row 0, column 'prompt': must be a text or a list of messages, got 7$"),
        (r'{"prompt": "a \ud83d"}', r"row 0, column 'prompt': '\\ud83d' is a lone surrogate"),
        (r'{"prompt": "a", "answer": ["\ud83d"]}', r"row 0, column 'answer': '\\ud83d' is a lone surrogate"),
        (
            '{"prompt": "a", "n": 1}\n{"prompt": "a", "n": [NaN]}',
            r"row 1, column 'n': \[nan\] has no JSON .*; write null",
        ),
        ('{"messages": []}\n', r"row 0, column 'messages': must be"),
        (
            '{"messages": [{"role": "user", "content": null}]}\n',
            "content of a message of role 'user' is None; write a text",
        ),
        (
            '{"prompt": [{"role": "user", "content": {"type": "text"}}]}\n',
            r"is {'type': 'text'}; write a text or a list",
        ),
        ('{"prompt": [{"role": "user", "content": ""}]}\n', "column 'prompt': no message has a content"),
        ('{"messages": [{"content": "hi"}]}\n', r"row 0, column 'messages': a message must have 'role' and 'content'"),
    ],
)
def test_a_broken_row_is_named_when_the_file_is_opened(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        file(path=written(tmp_path, lines))


def test_a_torn_parquet_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"p.parquet is not a whole \.parquet file"):
        file(path=written(tmp_path, "PAR1 and no more", "p.parquet"))


@pytest.mark.parametrize("image", [b"\x00", {"path": "a.png", "bytes": b"\x00"}])
def test_bytes_cannot_travel(tmp_path, image):
    table = pa.Table.from_pylist([{"prompt": "what is this?", "image": image}])
    with pytest.raises(DataError, match="row 0, column 'image': bytes"):
        file(path=as_parquet(tmp_path, table))


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^path=.*has no rows"):
        file(path=written(tmp_path, ""))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^path='/.*nowhere.jsonl' cannot be read: it is not there; name a file"):
        file(path=str(tmp_path / "nowhere.jsonl"))


def test_a_missing_file_is_looked_for_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        file(path="nowhere.jsonl")
    assert f"it is not there; the command runs in {tmp_path}; name a file that is there" in str(refused.value)


def test_an_unknown_suffix_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(ConfigError, match=r"suffix .csv; use one of .json, .jsonl, .ndjson, .parquet"):
        file(path="prompts.csv")


def test_a_system_prompt_with_plain_texts_is_a_contradiction(tmp_path):
    with pytest.raises(ConfigError, match="use text_as: user_message"):
        file(path=jsonl(tmp_path, *ROWS), text_as="text", system_prompt="Be brief.")


def test_times_in_nanoseconds_travel_as_others_do(tmp_path):
    """As pandas writes them: 123,456,789 ns, in a column and below one."""
    at = pa.array([123_456_789], type=pa.timestamp("ns"))
    nested = pa.StructArray.from_arrays([pa.array([123_456_789], type=pa.duration("ns"))], names=["took"])
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "at": at, "info": nested}), tmp_path / "p.parquet")
    columns = file(path=str(tmp_path / "p.parquet"))[0].columns
    assert columns == {"at": "1970-01-01 00:00:00.123456", "info": {"took": "0:00:00.123456"}}


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1 << 55], type=pa.timestamp("ms")),
        pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")]),
    ],
)
def test_a_value_that_python_cannot_hold_is_one_clear_error(tmp_path, column):
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "odd": column}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet, row 0 or later: a value cannot be read"):
        file(path=str(tmp_path / "p.parquet"))


def test_a_row_that_is_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match=r"p\.jsonl, line 1: not JSON"):
        file(path=str(tmp_path / "p.jsonl"))


def test_the_digest_is_of_each_row_as_sorted_json(tmp_path):
    """A run that began with another version resumes only if its rows have the digest that its passport names."""
    rows = [{"prompt": "1 + 1 =", "answer": 2, "a": [None, "é"]}, {"messages": MESSAGES}]
    as_json = (
        '{"a": [null, "é"], "answer": 2, "prompt": "1 + 1 ="}\n{"messages": [{"content": "1 + 1", "role": "user"}]}\n'
    )
    assert file(path=jsonl(tmp_path, *rows)).digest == hashlib.blake2b(as_json.encode(), digest_size=16).hexdigest()


def test_a_large_file_is_read_once_until_it_changes(tmp_path, monkeypatch):
    """Each start read and checked it three times, and held it twice."""
    monkeypatch.setattr("actors.prompts.file._LARGE_BYTES", 1)
    path = jsonl(tmp_path, *ROWS)
    first = file(path=path)
    assert file(path=path) is first
    assert file(path=path, text_as="text")[0].messages is None
    assert len(file(path=jsonl(tmp_path, *ROWS, *ROWS))) == 4
    assert len(first) == 2


def test_a_small_file_is_read_each_time(tmp_path):
    path = jsonl(tmp_path, *ROWS)
    assert file(path=path) is not file(path=path)
