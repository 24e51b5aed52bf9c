"""Worker processes: answers, errors in their own words, and never a process or a wait that stays behind."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from kvferry.bench import children
from kvferry.bench.children import Crew
from kvferry.bench.failure import BenchError
from kvferry.errors import ConfigError

TOY = str(Path(__file__).parent / "toy_role.py")


class Setup(msgspec.Struct):
    mischief: str = ""


@pytest.fixture
def crew(monkeypatch):
    monkeypatch.setattr(children, "HURRY_S", 0.2)
    monkeypatch.setattr(children, "LEAVE_S", 1.0)
    before = processes()
    with Crew([sys.executable, TOY]) as started:
        yield started
    assert processes() - before == set()


def processes():
    """This process's children; a fixture of other tests may have one that stays."""
    return set(psutil.Process().children(recursive=True))


def start(crew, name="prefill", mischief=""):
    child = crew.start(name, "toy_role:Toy", Setup(mischief))
    crew.ready(child)
    return child


def test_a_process_says_that_it_is_ready_and_answers(crew):
    child = crew.start("prefill", "toy_role:Toy", Setup())
    assert crew.ready(child) == child.process.pid
    assert crew.ask(child, "add", a=2, b=3) == 5


def test_an_answer_may_come_in_two_parts(crew):
    child = start(crew)
    assert crew.ask(child, "twice") == "first"
    assert crew.answer(child, "twice") == "second"


def test_several_processes_work_at_the_same_time(crew):
    pair = [start(crew, "prefill"), start(crew, "decode")]
    for number, child in enumerate(pair):
        crew.begin(child, "add", a=number, b=10)
    assert [crew.answer(child, "add") for child in reversed(pair)] == [11, 10]


def test_its_error_is_told_in_its_words_and_it_goes_on(crew, capfd):
    child = start(crew)
    with pytest.raises(BenchError, match=r"^prefill process: the bytes are wrong$"):
        crew.ask(child, "fail")
    with pytest.raises(BenchError, match=r"^prefill process: KeyError: 'nothing'$"):
        crew.ask(child, "stumble")
    assert "Traceback" in capfd.readouterr().err  # an error that nobody expected is shown in full
    assert crew.ask(child, "add", a=1, b=1) == 2


def test_what_it_was_told_wrong_is_an_error_of_the_input(crew):
    child = crew.start("decode", "toy_role:Toy", Setup("wrong input"))
    with pytest.raises(ConfigError, match=r"^decode process: 5 is wrong .use 6.$"):
        crew.ready(child)


def test_one_that_ends_at_its_start_is_told(crew):
    child = crew.start("decode", "toy_role:Toy", Setup("leave"))
    with pytest.raises(BenchError, match="the decode process ended early, with exit code 7"):
        crew.ready(child)


def test_one_that_ends_is_noticed_while_another_is_waited_for(crew):
    prefill, decode = start(crew, "prefill"), start(crew, "decode")
    crew.begin(decode, "leave", code=3)
    with pytest.raises(BenchError, match="the decode process ended early, with exit code 3"):
        crew.ask(prefill, "hang")


def test_one_that_was_told_wrong_is_heard_while_another_is_waited_for(crew):
    prefill = start(crew, "prefill")
    crew.start("decode", "toy_role:Toy", Setup("wrong input"))
    with pytest.raises(ConfigError, match="decode process: 5 is wrong"):
        crew.ask(prefill, "hang")


def test_one_that_is_killed_is_told_with_the_signal(crew):
    with pytest.raises(BenchError, match="the prefill process ended early, killed by SIGKILL"):
        crew.ask(start(crew), "kill")


def test_one_that_hangs_is_not_waited_for(crew):
    child = start(crew)
    with pytest.raises(BenchError, match=r"the prefill process did not answer 'hang' within 0.2 s"):
        crew.ask(child, "hang", limit_s=0.2)


def test_something_said_to_one_that_has_gone_is_told_at_the_answer(crew):
    child = start(crew)
    child.process.kill()
    child.process.wait()
    with pytest.raises(BenchError, match="ended early, killed by SIGKILL"):
        crew.ask(child, "add", a=1, b=1)


def test_one_that_does_not_leave_is_made_to(crew, monkeypatch):
    monkeypatch.setattr(children, "LEAVE_S", 0.2)
    child = start(crew, mischief="stay")
    crew.end([child])
    assert child.process.returncode == -9
    crew.end([child])  # a second time does nothing


def test_all_are_ended_after_an_error():
    before = processes()
    with Crew([sys.executable, TOY]) as crew:
        crew.begin(start(crew), "hang")
        start(crew, "decode")
        begin_s = time.monotonic()
        crew.__exit__(KeyboardInterrupt)
    assert processes() - before == set()
    assert time.monotonic() - begin_s < 30


def test_none_outlives_a_parent_that_is_gone():
    ended = subprocess.run([sys.executable, TOY, "orphan"], capture_output=True, text=True, timeout=60, check=True)
    worker = int(re.search(r"\d+", ended.stdout)[0])
    deadline_s = time.monotonic() + 20
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_one_whose_parent_was_gone_before_it_started_ends():
    ended = subprocess.run(
        [sys.executable, "-m", "kvferry.bench.child", str(os.getpid() + 1)], input=b"", timeout=60, check=False
    )
    assert ended.returncode == -9
