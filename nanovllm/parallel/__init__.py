"""``tensor_parallel_size=N``: one model on N devices, each rank with its share of every large matrix.

    the user's process                          rank 1, 2, ...
    LLM, scheduler, rank 0's runner             a runner
        decide a step
        describe it   -- channel, int32 -->     rebuild it from mirrored requests
        compute       <-- all-reduces -->       compute
        draw                                    draw the same: same logits, same seeds
        settle

Ranks are processes, started afresh without the user's main module, which end when their channel does. Nothing has a
fixed name or port: channels are inherited, gloo's ranks meet through a file in a private folder and listen on the
loopback, NCCL's get their id through the channel. After the start no pickle and no code travels (``messages``).

Small sums of a decode step are made by a kernel that reads the other GPUs' memories (``peer``), all others by NCCL.

When a rank dies, stops answering or fails, a guard thread ends all of them: every request gets an EngineError, and
a new engine can start at once (``group``, ``guard``).

``data_parallel_size=N``: N engines behind one, each on devices of its own and with ``tensor_parallel_size`` ranks. A
replica is a process like a rank, which builds a whole engine and is sent requests in place of steps:

    LLM -> Replicas, an LLMEngine        one numbers and checks requests, and draws their seeds      ``data``
             Balancer                    where each one goes                                         ``balance``
             Line  -- requests -->       a process with an engine                                    ``replica``
                   <-- outputs --        as arrays and JSON, no pickle                               ``wire``
             Line  <-- metrics --        what it has counted, when somebody asks                     ``fleet``
"""
