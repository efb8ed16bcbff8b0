"""The HTTP interface of ComfyUI: workflows, nodes, uploads."""
