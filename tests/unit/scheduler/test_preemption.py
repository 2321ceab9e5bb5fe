"""Who makes room when blocks or places run out, and how it comes back."""


def test_the_last_in_order_is_preempted_and_comes_back_whole(driver) -> None:
    d = driver(num_blocks=5)
    d.add("a", 8, max_tokens=8)
    d.add("b", 7, max_tokens=8)
    assert d.schedule() == {"a": 8, "b": 7}
    d.update()
    assert d.schedule() == {"a": 1, "b": 1}
    d.update(token=lambda name, _: ord(name))
    d.add("c", 3, max_tokens=1)
    # Both want a block now and none is free: b, the later, gives up two.
    assert d.schedule() == {"a": 1}
    assert d.removed() == ["b"]
    assert d.num_preemptions() == 1
    assert d.waiting_reasons() == {"blocks": 1, "order": 1}
    d.update()
    while "b" not in (scheduled := d.schedule()):
        assert list(scheduled) == ["a"], "nobody overtakes the preempted one"
        d.update()
    (new,) = [new for new in d.plan.new_sequences if d.names[new.sequence_id] == "b"]
    assert new.output_token_ids == [7, ord("b")]
    assert new.num_computed_tokens + scheduled["b"] == 9
    d.update()
    d.finish()


def test_the_first_in_order_always_advances(driver) -> None:
    d = driver(num_blocks=6, caching=False)
    for name in "abcd":
        d.add(name, 3, max_tokens=20)
    computed = 0
    while d.scheduler.has_unfinished():
        scheduled = d.schedule()
        if computed < 20:
            assert scheduled["a"] >= 1
            computed += 1
        d.update()
    assert d.num_preemptions() > 0


def test_a_cut_prompt_goes_on_when_a_later_sequence_gives_up_its_own_blocks(driver) -> None:
    d = driver(num_blocks=7, max_num_batched_tokens=12, long_prefill_token_threshold=4)
    d.add("long", 20, max_tokens=5)
    d.add("late", 8, max_tokens=9)
    for _ in range(2):
        assert d.schedule() == {"long": 4, "late": 4}
        d.update()
    assert d.schedule() == {"long": 4}
    assert d.removed() == ["late"]
    d.update()
    d.finish()


def test_the_cache_may_help_a_preempted_sequence(driver) -> None:
    d = driver(num_blocks=6)
    d.add("a", 11, max_tokens=3)
    d.add("b", 12, max_tokens=3)
    d.step()
    assert d.schedule() == {"a": 1}, "b needs a block"
    d.update()
    d.step()
    assert d.schedule() == {"b": 5}, "two of its three blocks are found"
    assert d.plan.new_sequences[0].num_computed_tokens == 8
    d.update()
    assert d.prefix_cache() == (23, 0), "counted at first admission"


def test_prompt_logprobs_are_delivered_once(driver) -> None:
    from quire.protocol.step import PromptLogprobs, TokenLogprobs

    def part(start: int, stop: int) -> PromptLogprobs:
        entries = [TokenLogprobs([position], [0.0], [1]) for position in range(start, stop)]
        return PromptLogprobs(start=start, entries=entries)

    d = driver(num_blocks=6, max_num_batched_tokens=8, policy="priority")
    d.add("a", 16, max_tokens=2, prompt_logprobs=0, priority=1)
    d.schedule()
    (output,) = d.update(prompt_logprobs={"a": part(1, 9)})
    assert (output.new_token_ids, output.prompt_logprobs) == ([], part(1, 9))
    d.add("b", 16, max_tokens=1, priority=0)
    while d.num_preemptions() == 0 or "b" in d.schedule():
        if d.num_preemptions() == 0:
            d.schedule()
        d.update(prompt_logprobs={})
    assert d.update(prompt_logprobs={"a": part(1, 6)}) == [], "known already"
    d.schedule()
    (output,) = d.update(prompt_logprobs={"a": part(6, 14)})
    assert output.prompt_logprobs == part(9, 14)


def test_a_better_priority_takes_the_place_of_a_worse_one(driver) -> None:
    d = driver(max_num_seqs=2, policy="priority")
    d.add("a", priority=2)
    d.add("b", priority=1)
    d.step()
    d.add("c", priority=1)
    assert d.schedule() == {"b": 1, "c": 5}
    assert d.removed() == ["a"], "out of the plan that was being made, too"
    d.update()
    d.add("e", priority=1)
    assert d.schedule() == {"b": 1, "c": 1}
    assert d.waiting_reasons() == {"capacity": 2}


def test_a_better_priority_takes_the_blocks_of_worse_ones(driver) -> None:
    d = driver(num_blocks=8, policy="priority")
    d.add("a", 8, priority=0)
    d.add("b", 6, priority=5)
    d.add("c", 6, priority=5)
    d.step()
    d.add("big", 16, max_tokens=4, priority=1)
    assert d.schedule() == {"a": 1, "big": 16}
    assert set(d.removed()) == {"b", "c"}
    d.update()
    d.finish()


def test_tokens_of_a_preempted_sequence_go_back_to_the_budget(driver) -> None:
    d = driver(num_blocks=4, max_num_batched_tokens=10, policy="priority")
    d.add("a", 5, max_tokens=3, priority=5)
    d.step()
    d.add("b", 9, max_tokens=2)
    d.add("c", 3, max_tokens=2)
    assert d.schedule() == {"b": 9, "c": 1}
    d.update()
    d.finish()


def test_nobody_is_preempted_in_vain(driver) -> None:
    d = driver(num_blocks=8, policy="priority")
    d.add("a", 19, max_tokens=4, priority=0)
    d.add("b", 3, max_tokens=4, priority=5)
    d.step()
    d.add("big", 24, max_tokens=4, priority=1)
    assert d.schedule() == {"a": 1, "b": 1}
    assert d.num_preemptions() == 0


def test_under_fcfs_a_newcomer_preempts_nobody(driver) -> None:
    d = driver(max_num_seqs=1)
    d.add("a", priority=5)
    d.step()
    d.add("b", priority=0)
    assert d.schedule() == {"a": 1}
    assert d.num_preemptions() == 0


def test_a_little_is_left_free_at_admission(driver) -> None:
    d = driver(num_blocks=200, max_num_batched_tokens=1000, max_model_len=1000)
    d.add("a", 400)
    d.add("b", 396)  # 100 + 99 blocks would fit, but two are to be left
    assert d.schedule() == {"a": 400}
    assert d.waiting_reasons() == {"blocks": 1}


def test_nothing_is_left_free_when_nothing_else_runs(driver) -> None:
    d = driver(num_blocks=200, max_num_batched_tokens=1000, max_model_len=1000)
    d.add("a", 800, max_tokens=1)
    assert d.schedule() == {"a": 800}
