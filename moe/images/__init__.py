"""Images in prompts: bytes of a client -> pixels -> rows for the text model.

- `decode`: an image's bytes become pixels in a process of its own (`decoder`), within limits.
- `towers`: the parts of a multimodal model that text does not need, loaded when a profile says
  ``model.images``.
- `reader.ImageReader`: transformers' own processor and model make of a conversation's text and
  pixels what the text model is given (`moe.network.prompt_rows.PromptRows`); a probe shows that our
  pass over these rows gives the logits of transformers' own forward.
"""
