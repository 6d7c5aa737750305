"""OpenAI's ``/v1/responses``, translated to chats and back."""
