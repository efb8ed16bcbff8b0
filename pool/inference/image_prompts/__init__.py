"""Image prompts: IP-Adapters and Redux, their key layouts, building, and use in a sampling run."""
