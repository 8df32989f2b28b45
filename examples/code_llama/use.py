"""Loads the exported model with trainwright and with transformers, and compares the logits."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainwright import AutoModel

tokenizer = AutoTokenizer.from_pretrained("exported")
prompt = tokenizer("def read_", return_tensors="pt")["input_ids"]
ours = AutoModel.from_pretrained("exported").eval()
theirs = AutoModelForCausalLM.from_pretrained("exported").eval()
with torch.no_grad():
    difference = (ours(prompt)["logits"] - theirs(prompt).logits).abs().max().item()
print(f"largest difference of two logits: {difference:.1e}")
print(tokenizer.decode(theirs.generate(prompt, max_new_tokens=40)[0]))
