"""OpenAI and Anthropic endpoints in front of the engines, which record every call as a step."""
