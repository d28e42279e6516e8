from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.hashing import page_keys, root
from router.policy.index import Batch, CacheEvent, Hit, Kind, PrefixIndex
from router.policy.keys import PromptKeys

ROOT = root(b"salt", "m", "r")


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(32_000) for _ in range(length)]


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    return page_keys(ROOT, tokens)


def stored(first: int, keys: Sequence[bytes], tier: str = "device", epoch: int = 1) -> Batch:
    return Batch(epoch, first, [CacheEvent(Kind.STORED, keys, tier)])


def hits(index: PrefixIndex, tokens: Sequence[int], *workers: str) -> list[int]:
    found = index.match(PromptKeys(ROOT, tokens))
    return [found[index.bit(w)].kv if index.bit(w) in found else 0 for w in workers]


# --- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 15, 16, 255, 256, 257, 272, 1000, 4096])
def test_lazy_keys_are_those_of_the_fleets_hash_bit_for_bit(length: int) -> None:
    tokens = prompt(length)
    lazy, whole = PromptKeys(ROOT, tokens), keys_of(tokens)
    assert list(lazy.links()) == whole[15::16]
    assert [key for link in range(len(whole) // 16 + 1) for key in lazy.units(link)] == whole


def test_lazy_keys_of_a_prompt_with_an_image_are_those_of_the_fleets_hash() -> None:
    tokens, extras = prompt(600), [(300, b"\x07" * 32)]
    lazy, whole = PromptKeys(ROOT, tokens, extras), page_keys(ROOT, tokens, extras)
    assert list(lazy.links()) == whole[15::16]
    assert [key for link in range(3) for key in lazy.units(link)] == whole
    assert list(lazy.links()) != keys_of(tokens)[15::16]


# --- look-up ------------------------------------------------------------------------------------------------------


def test_each_worker_is_found_with_its_own_longest_prefix() -> None:
    index, tokens = PrefixIndex(), prompt(2000)
    keys = keys_of(tokens)
    for worker, pages in (("a", 125), ("b", 40), ("c", 16), ("d", 3)):
        assert index.apply(worker, stored(1, keys[:pages]))
    assert hits(index, tokens, "a", "b", "c", "d", "e") == [2000, 640, 256, 48, 0]


def test_another_salt_is_another_prefix() -> None:
    """Public report T026 (sgl-project/sglang#24579)."""
    index, tokens = PrefixIndex(), prompt(512)
    index.apply("a", stored(1, keys_of(tokens)))
    other = PromptKeys(root(b"other", "m", "r"), tokens)
    assert index.match(other) == {}


def test_what_diverges_in_the_middle_matches_up_to_its_last_common_page() -> None:
    index, tokens = PrefixIndex(), prompt(2000)
    index.apply("a", stored(1, keys_of(tokens)))
    other = [*tokens[:700], *prompt(900, seed=1)]
    assert hits(index, other, "a") == [688]


def test_removed_pages_are_gone_from_the_tail() -> None:
    index, tokens = PrefixIndex(), prompt(512)
    keys = keys_of(tokens)
    index.apply("a", stored(1, keys))
    index.apply("a", Batch(1, 2, [CacheEvent(Kind.REMOVED, keys[:19:-1])]))
    assert hits(index, tokens, "a") == [320]


def test_lower_tiers_are_told_from_the_device() -> None:
    index, tokens = PrefixIndex(), prompt(1024)
    keys = keys_of(tokens)
    index.apply("a", stored(1, keys))
    index.apply("a", Batch(1, 2, [CacheEvent(Kind.TIER_CHANGED, keys[20:40], "host")]))
    index.apply("a", Batch(1, 3, [CacheEvent(Kind.TIER_CHANGED, keys[40:], "disk")]))
    found = index.match(PromptKeys(ROOT, tokens))
    assert found == {index.bit("a"): Hit(kv=1024, device=320, host=640, resume=1024)}
    index.apply("a", Batch(1, 4, [CacheEvent(Kind.TIER_CHANGED, keys[20:40], "device")]))
    assert index.match(PromptKeys(ROOT, tokens))[index.bit("a")].device == 640


def test_one_workers_tier_is_not_anothers() -> None:
    index, tokens = PrefixIndex(), prompt(256)
    for worker in ("a", "b"):
        index.apply(worker, stored(1, keys_of(tokens)))
    index.apply("b", Batch(1, 2, [CacheEvent(Kind.TIER_CHANGED, keys_of(tokens), "host")]))
    found = index.match(PromptKeys(ROOT, tokens))
    assert (found[index.bit("a")].device, found[index.bit("b")].device) == (256, 0)
    assert found[index.bit("b")].kv == 256


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_a_hybrid_model_resumes_from_the_last_checkpoint_at_or_before_its_pages() -> None:
    index, tokens = PrefixIndex(stateful=True), prompt(1100)
    keys = keys_of(tokens)
    index.apply("a", stored(1, keys[:50]))
    index.apply("b", stored(1, keys[:50]))
    for sequence, length in ((2, 256), (3, 512), (4, 1024)):
        event = CacheEvent(Kind.CHECKPOINT_READY, [keys[length // 16 - 1]], state_length=length)
        index.apply("a", Batch(1, sequence, [event]))
    found = index.match(PromptKeys(ROOT, tokens))
    assert (found[index.bit("a")].kv, found[index.bit("a")].resume) == (800, 512)
    assert (found[index.bit("b")].kv, found[index.bit("b")].resume) == (800, 0), "pages without a state are worthless"
    event = CacheEvent(Kind.CHECKPOINT_REMOVED, [keys[31]], state_length=512)
    index.apply("a", Batch(1, 5, [event]))
    assert index.match(PromptKeys(ROOT, tokens))[index.bit("a")].resume == 256


def test_a_checkpoint_off_the_grid_counts_where_the_prefix_ends() -> None:
    index, tokens = PrefixIndex(stateful=True), prompt(700)
    keys = keys_of(tokens)
    index.apply("a", stored(1, keys[:40]))
    index.apply("a", Batch(1, 2, [CacheEvent(Kind.CHECKPOINT_READY, [keys[39]], state_length=647)]))
    assert index.match(PromptKeys(ROOT, tokens))[index.bit("a")].resume == 647


def test_where_the_state_lies_is_known_and_follows_it_from_tier_to_tier() -> None:
    index, tokens = PrefixIndex(stateful=True), prompt(700)
    keys = keys_of(tokens)

    def tier(number: int = 0) -> str:
        return index.match(PromptKeys(ROOT, tokens))[index.bit("ab"[number])].state

    for worker in "ab":
        index.apply(worker, stored(1, keys[:40]))
        index.apply(worker, Batch(1, 2, [CacheEvent(Kind.CHECKPOINT_READY, [keys[39]], state_length=640)]))
    seen = [tier()]
    for sequence, place in ((3, "host"), (4, "disk"), (5, "device"), (6, "host")):
        index.apply("a", Batch(1, sequence, [CacheEvent(Kind.CHECKPOINT_READY, [keys[39]], place, 640)]))
        index.check()
        seen.append(tier())
    assert seen == ["", "host", "disk", "", "host"]
    assert tier(1) == "", "the other's is where it was"

    exported = index.export("a")
    assert exported is not None
    copy = PrefixIndex(stateful=True)
    copy.apply("a", Batch(1, exported.sequence, exported.events, snapshot=True, snapshot_end=True))
    assert copy.match(PromptKeys(ROOT, tokens))[copy.bit("a")] == index.match(PromptKeys(ROOT, tokens))[index.bit("a")]

    index.apply("a", Batch(1, 7, [CacheEvent(Kind.CHECKPOINT_REMOVED, [keys[39]], state_length=640)]))
    index.check()
    assert tier() == ""
    assert not index._lower_states


# --- the feed -----------------------------------------------------------------------------------------------------


def test_a_gap_in_the_sequence_asks_for_a_snapshot_and_is_healed_by_it() -> None:
    """Public report T179 (llm-d/llm-d-router#1737)."""
    index, tokens = PrefixIndex(), prompt(512)
    keys = keys_of(tokens)
    assert index.apply("a", stored(1, keys[:8]))
    assert not index.apply("a", stored(3, keys[16:]))
    assert not index.synced("a")
    assert index.position("a") == (1, 0)
    assert not index.apply("a", stored(4, keys)), "nothing is taken until the snapshot"
    assert index.apply("a", Batch(1, 9, [CacheEvent(Kind.STORED, keys[:20])], snapshot=True))
    assert not index.synced("a"), "a snapshot counts when its end is here"
    assert index.apply("a", Batch(1, 9, [CacheEvent(Kind.STORED, keys[20:24])], snapshot=True, snapshot_end=True))
    assert index.position("a") == (1, 9)
    assert hits(index, tokens, "a") == [384]
    assert index.apply("a", stored(10, keys[24:]))
    assert hits(index, tokens, "a") == [512]


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_number_no_worker_can_have_counted_to_is_not_counted_on_from(snapshot: bool) -> None:
    """Whoever asks for what comes after it, or writes it down, has a message that holds 64 bits."""
    index = PrefixIndex()
    keys = keys_of(prompt(64))
    index.apply("a", stored(1, keys[:1]))
    for number in (2**64 - 1, 2**63):
        event = CacheEvent(Kind.STORED, keys)
        assert index.apply("a", Batch(1, number, [event], snapshot=snapshot, snapshot_end=snapshot))
    assert index.position("a") == (1, 1)
    assert index.apply("a", stored(2, keys[1:]))
    assert index.position("a") == (1, 2)


def test_what_was_heard_already_is_not_taken_twice() -> None:
    index, tokens = PrefixIndex(), prompt(64)
    keys = keys_of(tokens)
    index.apply("a", stored(1, keys))
    index.apply("a", Batch(1, 2, [CacheEvent(Kind.REMOVED, [keys[3]])]))
    assert index.apply("a", stored(1, keys)), "an old batch is no gap"
    overlap = Batch(1, 2, [CacheEvent(Kind.REMOVED, [keys[3]]), CacheEvent(Kind.REMOVED, [keys[2]])])
    assert index.apply("a", overlap)
    assert hits(index, tokens, "a") == [32]


def test_a_new_epoch_forgets_the_old_ones_entries_and_an_old_epoch_is_not_heard() -> None:
    """Public report T004 (llm-d/llm-d-router#2854)."""
    index, tokens = PrefixIndex(), prompt(256)
    keys = keys_of(tokens)
    index.apply("a", stored(1, keys, epoch=1))
    index.apply("a", stored(1, keys[:4], epoch=2))
    assert hits(index, tokens, "a") == [64]
    assert index.apply("a", stored(2, keys, epoch=1))
    assert hits(index, tokens, "a") == [64]


def test_a_worker_that_is_forgotten_leaves_nothing_to_whoever_takes_its_place() -> None:
    index, tokens = PrefixIndex(), prompt(256)
    index.apply("a", stored(1, keys_of(tokens)))
    index.expect("a", keys_of(tokens), now=0.0)
    bit = index.bit("a")
    index.forget("a")
    assert index.bit("b") == bit
    assert index.match(PromptKeys(ROOT, tokens), expected=True) == {}
    index.check()


# --- expectation --------------------------------------------------------------------------------------------------


def test_what_was_sent_is_expected_for_a_while_and_only_when_asked_for() -> None:
    index, tokens = PrefixIndex(expect_s=5.0), prompt(512)
    names = PromptKeys(ROOT, tokens)
    index.expect("a", names.links(), now=0.0)
    assert index.match(names) == {}
    assert index.match(names, expected=True)[index.bit("a")].kv == 512
    index.expect("a", [], now=5.0)
    assert index.match(names, expected=True) == {}


# --- bounds -------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_and_what_is_looked_up_stays() -> None:
    """Public report T080 (llm-d/llm-d-router#2825; llm-d/llm-d-router#1158)."""
    index, hot = PrefixIndex(max_units=200), prompt(512)
    index.apply("a", stored(1, keys_of(hot)))
    for number in range(20):
        assert hits(index, hot, "a")[0] >= 256
        index.apply("a", stored(2 + number, keys_of(prompt(512, seed=100 + number))))
        index.check()
    assert len(index) <= 200


def ready(sequence: int, key: bytes, length: int = 256) -> Batch:
    return Batch(1, sequence, [CacheEvent(Kind.CHECKPOINT_READY, [key], state_length=length)])


@pytest.mark.parametrize("one_key", [False, True])
def test_checkpoints_are_bounded_whatever_a_worker_announces_and_never_takes_back(one_key: bool) -> None:
    index, keys = PrefixIndex(max_units=100, stateful=True), keys_of(prompt(16 * 1000))
    for number, key in enumerate(keys):
        index.apply("a", ready(number + 1, keys[0] if one_key else key, number))
        index.apply("b", ready(number + 1, key))
    index.check()
    for worker in "ab":
        known = index.export(worker)
        assert known is not None
        assert len(known.events) <= 100
    index.forget("a")
    index.forget("b")
    index.check()


def test_what_is_evicted_takes_its_checkpoints_along() -> None:
    index, hot = PrefixIndex(max_units=40, stateful=True), prompt(512)
    index.apply("a", stored(1, keys_of(hot)))
    index.apply("a", ready(2, keys_of(hot)[15]))
    assert index.match(PromptKeys(ROOT, hot))[index.bit("a")].resume == 256
    for number in range(4):  # the first time around it is spared: it was looked up
        index.apply("a", stored(3 + number, keys_of(prompt(512, seed=100 + number))))
    assert hits(index, hot, "a") == [0]
    index.apply("a", stored(7, keys_of(hot)))
    assert index.match(PromptKeys(ROOT, hot))[index.bit("a")].resume == 0
    index.check()


class IndexMachine(RuleBasedStateMachine):
    """Against the plain thing it stands for: a set of keys per worker."""

    prompts = (
        *tuple(prompt(200 + 100 * i, seed=i) for i in range(3)),
        [*prompt(200, seed=0)[:150], *prompt(200, seed=9)],
    )

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, dict[bytes, str]] = {name: {} for name in "abc"}
        self.sequence = dict.fromkeys("abc", 0)
        self.epoch = dict.fromkeys("abc", 1)

    def say(self, worker: str, event: CacheEvent) -> None:
        self.sequence[worker] += 1
        assert self.index.apply(worker, Batch(self.epoch[worker], self.sequence[worker], [event]))

    @rule(worker=st.sampled_from("abc"), which=st.integers(0, 3), pages=st.integers(1, 25))
    def store(self, worker: str, which: int, pages: int) -> None:
        keys = keys_of(self.prompts[which])[:pages]
        self.say(worker, CacheEvent(Kind.STORED, keys))
        self.held[worker].update(dict.fromkeys(keys, "device"))

    def behind(self, worker: str, keys: Sequence[bytes]) -> list[bytes]:
        """What the worker holds of `keys` and of whatever continues them: the end of a prefix goes first."""
        found = {key: None for key in keys if key in self.held[worker]}
        for tokens in self.prompts:
            chain = keys_of(tokens)
            first = next((place for place, key in enumerate(chain) if key in found), len(chain))
            found |= {key: None for key in chain[first:] if key in self.held[worker]}
        return list(found)

    @rule(worker=st.sampled_from("abc"), which=st.integers(0, 3), pages=st.integers(0, 20))
    def remove_tail(self, worker: str, which: int, pages: int) -> None:
        keys = self.behind(worker, keys_of(self.prompts[which])[pages:])[::-1]
        self.say(worker, CacheEvent(Kind.REMOVED, keys))
        for key in keys:
            self.held[worker].pop(key, None)

    @rule(worker=st.sampled_from("abc"), which=st.integers(0, 3), tier=st.sampled_from(["host", "disk", "device"]))
    def move(self, worker: str, which: int, tier: str) -> None:
        held, tiers = self.held[worker], ["device", "host", "disk"]
        keys = [key for key in keys_of(self.prompts[which]) if key in held]
        higher = [key for key in self.behind(worker, keys) if tiers.index(held[key]) < tiers.index(tier)]
        keys = list(dict.fromkeys([*keys, *higher]))
        self.say(worker, CacheEvent(Kind.TIER_CHANGED, keys, tier))
        held.update(dict.fromkeys(keys, tier))

    @rule(
        worker=st.sampled_from("abc"),
        which=st.integers(0, 3),
        page=st.integers(0, 20),
        kind=st.sampled_from([Kind.CHECKPOINT_READY, Kind.CHECKPOINT_REMOVED]),
        tier=st.sampled_from(["host", "disk", "device"]),
    )
    def save_or_lose_a_state(self, worker: str, which: int, page: int, kind: Kind, tier: str) -> None:
        key = keys_of(self.prompts[which])[page % 12]
        self.say(worker, CacheEvent(kind, [key], tier, state_length=16 * page))

    @rule(worker=st.sampled_from("abc"))
    def restart(self, worker: str) -> None:
        self.epoch[worker] += 1
        self.sequence[worker] = 0
        self.held[worker] = {}
        self.say(worker, CacheEvent(Kind.REMOVED, []))

    @rule(worker=st.sampled_from("abc"), lost=st.integers(1, 3))
    def lose_and_resync(self, worker: str, lost: int) -> None:
        self.sequence[worker] += lost
        late = Batch(self.epoch[worker], self.sequence[worker] + 1, [CacheEvent(Kind.STORED, [b"x" * 32])])
        assert not self.index.apply(worker, late)
        events = [CacheEvent(Kind.STORED, [key], tier) for key, tier in self.held[worker].items()]
        self.index.apply(worker, Batch(self.epoch[worker], self.sequence[worker], events, True, True))

    @rule(worker=st.sampled_from("abc"))
    def go(self, worker: str) -> None:
        self.index.forget(worker)
        self.held[worker] = {}
        self.sequence[worker] = 0
        self.epoch[worker] += 1

    @invariant()
    def finds_what_is_held(self) -> None:
        for tokens in self.prompts:
            keys = keys_of(tokens)
            found = self.index.match(PromptKeys(ROOT, tokens))
            for worker, held in self.held.items():
                here = found.get(self.index.bit(worker), Hit(0, 0, 0, 0))
                assert here.kv == 16 * _prefix(keys, held, ("device", "host", "disk"))
                assert here.device == 16 * _prefix(keys, held, ("device",))
                assert here.host == 16 * _prefix(keys, held, ("device", "host"))

    @invariant()
    def adds_up(self) -> None:
        self.index.check()


def _prefix(keys: Sequence[bytes], held: dict[bytes, str], tiers: tuple[str, ...]) -> int:
    """By links first, as presence is prefix-closed within a worker (a test may store a prefix of any length)."""
    count = 0
    for key in keys:
        if held.get(key) not in tiers:
            break
        count += 1
    return count


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
