"""Prometheus text: what a scraper reads is what ``get_metrics`` says."""

import sys

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nanovllm import SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.metrics import Collector, Counter, Gauge, Histogram, exposition
from nanovllm.metrics.figures import METRICS


@pytest.fixture
def busy(open_llm):
    llm = open_llm()
    llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    return llm


def samples(text):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def expected(figures):
    """{(sample, labels): value}, as the format writes a counter, a gauge and a histogram."""
    found = {}
    for figure in figures:
        labels = frozenset(figure.labels.items())
        if isinstance(figure, Histogram):
            found[figure.name + "_count", labels] = figure.count
            found[figure.name + "_sum", labels] = figure.sum
            for bound, number in figure.buckets.items():
                found[figure.name + "_bucket", labels | {("le", bound)}] = number
        else:
            assert isinstance(figure, (Counter, Gauge))
            found[figure.name + "_total" * isinstance(figure, Counter), labels] = figure.value
    return {key: value for key, value in found.items() if "tokens_per_second" not in key[0]}


def test_a_scraper_reads_what_get_metrics_says(busy):
    found = samples(exposition(busy))
    said = expected(busy.get_metrics())
    assert {key: value for key, value in found.items() if "tokens_per_second" not in key[0]} == pytest.approx(said)
    assert len([key for key in found if "tokens_per_second" in key[0]]) == 2


def test_vllms_names_for_what_vllm_has(busy):
    ours, theirs = samples(exposition(busy)), samples(exposition(busy, vllm_names=True))
    kept = {name for name, _ in theirs if name.startswith("nanovllm:")}
    parts = ("tokens_per_second", "num_evictions", "num_steps", "step_seconds", "step_requests")
    assert kept and all(name.removeprefix("nanovllm:").startswith(parts) for name in kept)
    assert {name.partition(":")[2] for name, _ in ours} == {name.partition(":")[2] for name, _ in theirs}
    labels = frozenset({("model_name", busy.config.model), ("engine", "0")})
    assert theirs["vllm:generation_tokens_total", labels] == 12
    assert theirs["vllm:request_success_total", labels | {("finished_reason", "length")}] == 3
    assert theirs["vllm:iteration_tokens_total_count", labels] == 4
    assert ("vllm:kv_cache_usage_perc", labels) in theirs


def test_every_family_says_what_it_is(busy):
    families = {family.name: family for family in text_string_to_metric_families(exposition(busy))}
    for name, about in METRICS.items():
        if name != "device_memory_bytes":
            family = families[f"nanovllm:{name}"]
            assert family.documentation == about.text + "." and family.type == about.kind.__name__.lower()


def test_the_global_registry_stays_as_it_is_and_ones_own_works(busy):
    before = generate_latest(REGISTRY)
    exposition(busy)
    assert b"nanovllm" not in before and b"nanovllm" not in generate_latest(REGISTRY)
    registry = CollectorRegistry()
    registry.register(Collector(busy, vllm_names=True))
    assert b"vllm:prompt_tokens_total" in generate_latest(registry)


def test_a_label_may_hold_any_text(busy):
    for figure in busy.get_metrics():
        figure.labels["model_name"] = 'a "b"\\c\nd'

    class Source:
        def get_metrics(self, *, per_replica=False):
            figures = busy.get_metrics(per_replica=per_replica)
            for figure in figures:
                figure.labels["model_name"] = 'a "b"\\c\nd'
            return figures

    names = {dict(labels)["model_name"] for _, labels in samples(exposition(Source()))}
    assert names == {'a "b"\\c\nd'} and busy.get_metrics()[0].labels["model_name"] == busy.config.model


def test_without_the_package_the_text_is_refused_and_the_figures_are_there(busy, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'nanovllm\[metrics\]'"):
        exposition(busy)
    assert busy.get_metrics()
