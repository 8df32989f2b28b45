"""Every kind of training data, as overrides of tests/project/run.yaml."""

POINTS = "{{type: parts.py:{0}, size: {1}, noise: 0.1, weight: {2}}}"
MIXED = "data.train={{type: mix, sources: {{one: {0}, two: {1}}}}}"
PACKED = (
    "model={type: llama, vocab_size: 50, hidden_size: 16, num_layers: 1, num_heads: 2, dropout: 0.1}",
    "trainer.type=language_model",
    "data.eval={}",
    "evaluation.metrics={}",
)
CHATS = "type: chat, path: [chats_a.jsonl, chats_b.jsonl], tokenizer: bytes, max_length: 96"
CHAT_RUN = (
    "model={type: llama, vocab_size: 260, hidden_size: 16, num_layers: 1, num_heads: 2, dropout: 0.1}",
    "trainer.type=sft",
    "data.collator={type: padded, tokenizer: bytes}",
    "data.eval={}",
    "evaluation.metrics={}",
)
SOURCES = {
    "a plain iterable that ends": ("data.train={type: parts.py:PointStream, size: 90, noise: 0.1}",),
    "a stream of shards with a state": ("data.train={type: parts.py:ShardedPoints, size: 200, noise: 0.1}",),
    "a stream in its second pass": (
        "data.train={type: parts.py:ShardedPoints, size: 41, noise: 0.1}",
        "trainer.max_epochs=3",
    ),
    "a mixture": (MIXED.format(POINTS.format("Points", 50, 3), POINTS.format("Points", 9, 1)),),
    "a mixture of streams": (
        MIXED.format(POINTS.format("ShardedPoints", 60, 3), POINTS.format("ShardedPoints", 40, 1)),
    ),
    "packed documents": (*PACKED, "data.train={type: pack, length: 32, source: {type: parts.py:Documents}}"),
    "a packed stream": (
        *PACKED,
        "data.train={type: pack, length: 32, source: {type: parts.py:DocumentStream, size: 600}}",
    ),
    "chats": (*CHAT_RUN, f"data.train={{{CHATS}}}"),
    "a stream of chats": (*CHAT_RUN, f"data.train={{{CHATS}, streaming: true}}", "trainer.max_epochs=5"),
}
