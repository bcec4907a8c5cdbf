"""The names of the KV sequences a request has: one word each in plans, metrics and dumps."""

MAIN_LABEL = "main"
# The further contexts of a guided request, in the order in which it gives them.
GUIDANCE_LABELS = ("cfg_text", "cfg_img")
# The plan label that covers them all where they are planned together.
COMBINED_LABEL = "guided"
