"""What people see of many streams at once: nothing lost, nothing torn, each line with its name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.workers.lines import (
    HELD_BYTES,
    LAST_BYTES,
    LAST_LINES,
    Held,
    LastLines,
    Matching,
    Screen,
    Voice,
    to_bytes,
)

PREFIXES = (b"<0>", b"<1>", b"<2>")
# Anything but the characters of a prefix, newlines more often than chance would have it.
DATA = st.lists(
    st.sampled_from([b"\n", b"\n\n", b"\r", b"\0", b"\xff\xfe", b"a", b"words of a line", b"line\n"])
    | st.binary(max_size=6).map(lambda data: data.replace(b"<", b"").replace(b">", b"")),
    max_size=4,
).map(b"".join)
PIECES = st.lists(st.tuples(st.integers(0, 2), DATA), max_size=30)


def lines_of(shown: bytes) -> list[bytes]:
    return shown.removesuffix(b"\n").split(b"\n") if shown else []


def render(pieces: list[tuple[int, bytes]], voices: list[Voice], end: bool) -> bytes:
    screen = Screen()
    shown = b"".join(screen.render(voices[who], data) for who, data in pieces)
    if end:
        shown += b"".join(screen.end(voice) for voice in voices)
    return shown


class TestScreen:
    @given(PIECES, st.booleans(), st.booleans())
    def test_every_line_carries_the_prefix_of_who_wrote_it(
        self, pieces: list[tuple[int, bytes]], redraws: bool, end: bool
    ) -> None:
        shown = render(pieces, [Voice(prefix, redraws=redraws) for prefix in PREFIXES], end)
        for line in lines_of(shown):
            assert line[:3] in PREFIXES
            assert not any(prefix in line[3:].replace(b"\r" + line[:3], b"\r") for prefix in PREFIXES)

    @given(PIECES)
    def test_without_prefixes_and_added_newlines_each_stream_reads_as_it_was_written(
        self, pieces: list[tuple[int, bytes]]
    ) -> None:
        shown = render(pieces, [Voice(prefix) for prefix in PREFIXES], end=True)
        for who, prefix in enumerate(PREFIXES):
            written = b"".join(data for whose, data in pieces if whose == who)
            read = b"".join(line[3:] + b"\n" for line in lines_of(shown) if line.startswith(prefix))
            # What was added stands where a line was broken or left open; all else is the stream's, in its order.
            left = written
            for line in lines_of(read):
                assert left.startswith(line)
                left = left[len(line) :].removeprefix(b"\n")
            assert left == b""

    @given(st.lists(DATA, max_size=20))
    def test_a_lone_voice_is_shown_exactly(self, pieces: list[bytes]) -> None:
        written = b"".join(pieces)
        shown = render([(0, data) for data in pieces], [Voice(b"<0>")], end=False)
        lines = [line + b"\n" for line in written.split(b"\n")]
        lines[-1] = lines[-1][:-1]
        assert shown == b"".join(b"<0>" + line for line in lines if line)

    @given(PIECES)
    def test_exact_voices_lose_no_byte_even_between_the_launchers_words(self, pieces: list[tuple[int, bytes]]) -> None:
        voices = [Voice(exact=True), Voice(b"<1>"), Voice(b"<2>")]
        shown = render(pieces, voices, end=False)
        own = [line for line in lines_of(shown) if line[:3] not in PREFIXES]
        written = b"".join(data for who, data in pieces if who == 0)
        assert b"".join(own) == written.replace(b"\n", b"")
        if all(who == 0 for who, _ in pieces):
            assert shown == written

    def test_a_line_goes_on_without_a_second_prefix(self) -> None:
        assert render([(0, b"10%"), (0, b"\r20%"), (0, b"\n")], [Voice(b"<0>")], end=False) == b"<0>10%\r20%\n"

    def test_who_speaks_into_an_open_line_starts_a_new_one(self) -> None:
        voices = [Voice(b"<0>"), Voice(b"<1>")]
        assert render([(0, b"load"), (1, b"x\n"), (0, b"ed\n")], voices, end=False) == b"<0>load\n<1>x\n<0>ed\n"

    def test_the_added_newline_stands_for_the_one_that_follows(self) -> None:
        voices = [Voice(b"<0>"), Voice(b"<1>")]
        assert render([(0, b"load"), (1, b"x\n"), (0, b"\nnext\n")], voices, end=False) == b"<0>load\n<1>x\n<0>next\n"

    def test_of_an_exact_voice_that_newline_is_shown_as_well(self) -> None:
        voices = [Voice(exact=True), Voice(b"<1>")]
        assert render([(0, b"load"), (1, b"x\n"), (0, b"\nnext\n")], voices, end=False) == b"load\n<1>x\n\nnext\n"

    @pytest.mark.parametrize(
        ("pieces", "shown"),
        [
            ([b"\r10%", b"\r20%", b" done\n"], b"<0>\r<0>10%\r<0>20% done\n"),
            ([b"10%\r", b"20%\r", b"\n"], b"<0>10%\r<0>20%\r\n"),
            ([b"a\r\nb\r\n"], b"<0>a\r\n<0>b\r\n"),
            ([b"a\r", b"\nb\r", b"\rc\n"], b"<0>a\r\n<0>b\r\r<0>c\n"),
        ],
    )
    def test_on_a_terminal_a_redrawn_line_keeps_its_prefix(self, pieces: list[bytes], shown: bytes) -> None:
        assert render([(0, data) for data in pieces], [Voice(b"<0>", redraws=True)], end=False) == shown

    def test_a_stream_that_ends_in_mid_line_gets_its_newline(self) -> None:
        assert render([(0, b"last words")], [Voice(b"<0>")], end=True) == b"<0>last words\n"
        assert render([(0, b"last words")], [Voice(exact=True)], end=True) == b"last words"

    def test_after_a_loss_the_next_words_start_a_line(self) -> None:
        screen, voice = Screen(), Voice(b"<0>")
        assert screen.render(voice, b"begin") == b"<0>begin"
        screen.lose(voice)
        assert screen.render(voice, b"later\n") == b"\n<0>later\n"


class TestHeld:
    @given(st.lists(DATA, max_size=20))
    def test_all_that_is_fed_comes_out_in_order(self, pieces: list[bytes]) -> None:
        held = Held()
        shown = b"".join(held.feed(data) for data in pieces) + held.take()
        assert shown == b"".join(pieces)
        assert not held

    @given(st.lists(DATA.filter(bool), max_size=20))
    def test_only_whole_lines_leave_it(self, pieces: list[bytes]) -> None:
        held = Held()
        assert all(ready.endswith(b"\n") for data in pieces if (ready := held.feed(data)))

    def test_an_endless_line_is_shown_in_pieces(self) -> None:
        held = Held()
        shown = 0
        for _ in range(100):
            shown += len(held.feed(b"#" * 4096))
            assert len(held._bytes) <= HELD_BYTES
        assert shown + len(held.take()) == 409600

    def test_a_long_rest_after_a_newline_is_not_kept_either(self) -> None:
        assert Held().feed(b"a\n" + b"#" * (HELD_BYTES + 1)).endswith(b"#")


class TestLastLines:
    @given(st.lists(DATA, max_size=40))
    def test_they_are_the_end_of_what_was_written(self, pieces: list[bytes]) -> None:
        last = LastLines()
        for data in pieces:
            last.feed(data)
        text = b"".join(pieces).decode(errors="replace")
        wanted = [line.rstrip("\r").split("\r")[-1] for line in text.removesuffix("\n").split("\n")] if text else []
        assert list(last.lines()) == wanted[-LAST_LINES:]

    @pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
    def test_memory_is_bounded_for_any_size_of_piece(self, size: int) -> None:
        last = LastLines()
        data = b"0123456789abcde\n" * 20_000
        for at in range(0, len(data), size):
            last.feed(data[at : at + size])
            assert len(last._bytes) <= 2 * LAST_BYTES + 2
        assert last.lines() == ("0123456789abcde",) * LAST_LINES

    def test_a_line_cut_at_its_start_is_left_out(self) -> None:
        last = LastLines()
        last.feed(b"a" * LAST_BYTES + b"\nend\n")
        assert last.lines() == ("end",)

    def test_of_one_endless_line_the_end_is_kept(self) -> None:
        last = LastLines()
        last.feed(b"a" * LAST_BYTES)
        last.feed(b"b" * 10)
        assert last.lines() == ("a" * (LAST_BYTES - 10) + "b" * 10,)

    def test_of_a_progress_bar_its_last_state(self) -> None:
        last = LastLines()
        last.feed(b"\r10%\r20%\r30%\r\n")
        assert last.lines() == ("30%",)

    def test_a_cut_character_does_not_spoil_the_rest(self) -> None:
        last = LastLines()
        last.feed("é".encode()[1:] + b" after\n")
        assert last.lines() == ("� after",)


class TestMatching:
    @given(st.lists(st.sampled_from([b"loss=", b"lo", b"ss=1", b"epoch 3", b"\n", b" x", b"\xff"]), max_size=40))
    def test_it_picks_the_lines_that_contain_a_text(self, pieces: list[bytes]) -> None:
        matching = Matching(("loss=", "epoch"), b"[0]:")
        picked = b"".join(matching.feed(data) for data in pieces) + matching.end()
        lines = b"".join(pieces).removesuffix(b"\n").split(b"\n")
        assert picked == b"".join(b"[0]:" + line + b"\n" for line in lines if b"loss=" in line or b"epoch" in line)

    def test_an_empty_text_matches_every_line(self) -> None:
        assert Matching(("",), b"> ").feed(b"a\n\nb\n") == b"> a\n> \n> b\n"

    def test_a_text_with_its_newline_matches_that_line_alone(self) -> None:
        assert Matching(("done\n",), b"").feed(b"done\nnot done yet\nx\n") == b"done\n"

    @pytest.mark.parametrize("text", ["head", "tail"])
    def test_an_overlong_line_is_judged_by_its_beginning(self, text: str) -> None:
        matching = Matching((text,), b"> ")
        picked = matching.feed(b"head" + b"#" * HELD_BYTES)
        picked += matching.feed(b"#" * 1000) + matching.feed(b"tail\nshort\n")
        wanted = b"> head" + b"#" * (HELD_BYTES + 1000) + b"tail\n"
        assert picked == (wanted if text == "head" else b"")


def test_names_that_are_no_text_are_shown_somehow() -> None:
    assert to_bytes("a\udcffb") == b"a\xffb"
    assert to_bytes("a\ud800b") == b"a\\ud800b"
