"""headrace runs mixture-of-experts language models that are larger than the machine's memory."""
