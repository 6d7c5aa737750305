"""OpenAI's chats and completions, the native dialect: the others are translated to chats."""
