"""Imports what the tests need and takes it out of the garbage collector's sight, once, while no tensor is alive.

A step that is measured collects garbage and looks at all objects: half a second each time with transformers loaded.
Done later, this would also hide the tensors of other tests, and with them change what counts as alive.
"""

from __future__ import annotations

import gc

import torch
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration
from transformers import ViTForImageClassification as _ViT

import legroom

USED = (
    torch,
    legroom,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    _ViT,
)

gc.collect()
gc.freeze()
