"""A recording of every step of an engine, and what can be made of it: a page, a Chrome trace, an explanation in words.

    LLM(..., trace="run.html")
        |
        v
    Recorder, an observer ---> recording ---> page/         run.html: watch it step by step
    recorder.py                recording.py   perfetto.py   run.json: the same for a viewer of Chrome traces
                               file.py        explain.py    nanovllm explain run.html
                                              replay.py     who holds which block, who waits, after each step

``step.py`` is how steps are kept meanwhile, ``ledger.py`` tells whose blocks are meant, ``live.py`` serves the page
while the engine runs.

Without ``trace=`` nothing of this is imported, no observer is called and the block manager keeps no journal.
"""
