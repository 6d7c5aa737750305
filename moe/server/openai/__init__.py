"""OpenAI's chats and completions. The other APIs are translated to chats and back."""
