from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.sim.agenda import Agenda
from bench.sim.fabric import Fabric
from bench.sim.noise import LENGTH, Reader, Tape
from bench.sim.profile import NoiseTerms, Profile, Transfer
from bench.sim.store import Store
from bench.sim.trace import Entry, KeyBook, load, tokens_of
from kvtransfer.hashing import page_keys, root
from router.policy.index import Kind, PrefixIndex
from runtime.errors import InvalidRequest

# --- agenda -------------------------------------------------------------------------------------------------------


def test_what_happens_at_one_time_happens_in_the_order_it_was_put_in() -> None:
    agenda = Agenda()
    seen: list[str] = []
    for name, time in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        agenda.at(time, seen.append, name)
    agenda.run(until=1.5)
    assert seen == ["a"]
    agenda.at(0.0, seen.append, "late")
    agenda.run()
    assert seen == ["a", "late", "b", "c"]
    assert agenda.now == 2.0


# --- noise --------------------------------------------------------------------------------------------------------


def test_a_run_of_steps_takes_the_sum_of_its_steps() -> None:
    tape = Tape(NoiseTerms(0.2, 0.01, 5.0, 0), seed=1)
    reader = Reader(tape, seed=2)
    start = reader.run(500)
    by_hand = sum((0.01 + 1e-5 * i) * tape.factors[start + i] for i in range(500))
    assert reader.seconds(start, 500, 0.01, 1e-5) == pytest.approx(by_hand, rel=1e-6)


def test_the_tape_never_ends_and_every_factor_is_positive() -> None:
    reader = Reader(Tape(NoiseTerms(0.2, 0.01, 5.0, 0), seed=1), seed=2)
    for _ in range(3 * LENGTH // 4000):
        start = reader.run(4000)
        assert 0 <= start <= LENGTH - 4000
        reader.used(4000)
        assert reader.next() > 0


# --- fabric -------------------------------------------------------------------------------------------------------


def fabric() -> tuple[Agenda, Fabric]:
    agenda = Agenda()
    return agenda, Fabric(agenda, Transfer(setup_s=0.5, bandwidth_Bps=100.0, shared_nic_workers=2))


def arrivals(*flows: tuple[float, int, int, float]) -> list[float]:
    """(begin, source, target, bytes) -> arrival times."""
    agenda, net = fabric()
    times = [0.0] * len(flows)

    def arrived(number: int) -> None:
        times[number] = agenda.now

    for number, (begin, source, target, size) in enumerate(flows):
        agenda.at(begin, net.send, source, target, size, lambda number=number: arrived(number))
    agenda.run()
    assert net.active() == 0
    return times


def test_a_lone_flow_gets_the_whole_bandwidth() -> None:
    assert arrivals((0.0, 0, 4, 200.0)) == [2.5]


def test_neighbours_share_their_nic_and_strangers_do_not() -> None:
    assert arrivals((0.0, 0, 4, 200.0), (0.0, 1, 6, 200.0)) == [4.5, 4.5]
    assert arrivals((0.0, 0, 4, 200.0), (0.0, 2, 6, 200.0)) == [2.5, 2.5]
    assert arrivals((0.0, 0, 4, 200.0), (0.0, 2, 5, 200.0)) == [4.5, 4.5], "the target's NIC counts too"


def test_a_flow_speeds_up_when_its_neighbour_is_done() -> None:
    # both at 50 until the short one has its 100 after 2 s, then the long one's last 100 at 100
    assert arrivals((0.0, 0, 4, 200.0), (0.0, 1, 6, 100.0)) == [3.5, 2.5]


# --- store --------------------------------------------------------------------------------------------------------


def hybrid(**pool: int) -> Profile:
    import copy

    import yaml

    from bench.sim.profile import find

    content = copy.deepcopy(yaml.safe_load(find("sim-hybrid-48b").read_text()))
    content["pool"].update(pool)
    return Profile.parse("p", content)


def test_the_events_of_a_store_keep_an_index_right() -> None:
    """Whatever is published, evicted to host, dropped to disk and beyond: the index says what find() finds."""
    store = Store(hybrid(kv_tokens=32_768, host_kv_tokens=16_384, disk_kv_tokens=16_384, state_slots=8), 256, epoch=1)
    index, book = PrefixIndex(stateful=True), KeyBook(256)
    prompts = [Entry(0.0, 8192 + 512 * n, 1, tuple(range(100 * n, 100 * n + 16 + n))) for n in range(12)]
    for turn in range(40):
        entry = prompts[turn * 7 % 12]
        keys = book.of(entry)
        found = store.find(keys.keys, entry.prompt_tokens)
        pages = store.allocate(found.pages, entry.prompt_tokens)
        assert pages is not None
        assert store.take_slot()
        store.publish(keys.keys, pages)
        store.checkpoint(keys.keys, found.resume, entry.prompt_tokens)
        store.release(pages)
        store.give_slot()
        store.check()
        batch = store.events()
        if batch is not None:
            assert index.apply("w", batch)
            assert any(event.kind in (Kind.STORED, Kind.TIER_CHANGED, Kind.CHECKPOINT_READY) for event in batch.events)
        for other in prompts:
            names = book.of(other)
            told = index.match(names).get(index.bit("w"))
            assert (told.resume if told else 0) == store.find(names.keys, other.prompt_tokens + 1).resume


# --- traces -------------------------------------------------------------------------------------------------------


def test_keys_of_a_trace_are_page_keys_of_the_tokens_its_hashes_stand_for() -> None:
    entry = Entry(0.0, 1300, 5, (7, 8, 9))
    tokens = [int(token) for block in entry.blocks for token in tokens_of(block)][:1300]
    whole = page_keys(root(b"", "sim", "sim"), tokens)
    for unit in (16, 64, 256):
        keys = KeyBook(unit).of(entry)
        assert keys.keys == whole[unit // 16 - 1 :: unit // 16][: 1300 // unit]
        assert list(keys.links()) == whole[15::16]
        assert [key for link in range(6) for key in keys.units(link)] == keys.keys


def test_equal_hashes_are_equal_text_only_behind_equal_prefixes() -> None:
    book = KeyBook(256)
    one, two = book.of(Entry(0.0, 1024, 1, (1, 2))), book.of(Entry(0.0, 1024, 1, (1, 3)))
    other = book.of(Entry(0.0, 1024, 1, (4, 2)))
    assert one.keys[:2] == two.keys[:2]
    assert not set(one.keys) & set(other.keys)


def test_both_kinds_of_traces_are_read_plain_or_packed(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 10, "output_length": 7, "hash_ids": [1]},
    ]
    mooncake = tmp_path / "m.jsonl.gz"
    mooncake.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    assert load(mooncake) == [Entry(0.0, 10, 7, (1,)), Entry(2.0, 600, 1, (1, 2))]
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,600,44\n2023-11-16 18:15:47.1805900,5,3\n"
    )
    entries = load(azure)
    assert [(entry.at, entry.prompt_tokens, entry.output_tokens) for entry in entries] == [(0.0, 600, 44), (0.5, 5, 3)]
    assert not set(entries[0].blocks) & set(entries[1].blocks), "nothing is shared"
    assert len(load(azure, 1)) == 1
    assert [(entry.at, entry.prompt_tokens) for entry in load(azure, 1, skip=1)] == [(0.0, 5)]


@pytest.mark.parametrize("text", ["", "{}", "a,b\n1,2\n", '{"timestamp": 0, "input_length": 99999, "hash_ids": [1]}'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        load(file)
    assert caught.value.field == "trace"
