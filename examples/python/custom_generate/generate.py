# SPDX-License-Identifier: Apache-2.0
"""For the folder of a model, as custom_generate/generate.py: every `generate` of it uses kvferry.

    transformers serve FOLDER --trust-remote-code

Transformers reads this file by itself where code of a model's folder is trusted; pipelines do, too, with
trust_remote_code=True. Knows no model.
"""
import kvferry.hf


def generate(*args, model, **kwargs):
    """The model's own `generate`, with a cache of pages where none is passed."""
    return kvferry.hf.use(model, budget=1024).generate(*args, **kwargs)
