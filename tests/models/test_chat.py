import pytest

from paxkv.errors import ConfigError
from paxkv.models.chat import ChatTemplate

HELLO = [{"role": "user", "content": "Hi <&> é"}]


def test_variables_and_whitespace_rules():
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if true %}\n[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endif %}\n"
        "{% endfor %}\n{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = ChatTemplate(source=source, bos_token="<s>", eos_token="</s>")
    assert template.render(HELLO, True) == "<s>[user]Hi <&> é</s>[assistant]"
    assert template.render(HELLO, False) == "<s>[user]Hi <&> é</s>"


def test_tojson_keeps_characters():
    template = ChatTemplate(source="{{ messages[0] | tojson }}")
    assert template.render(HELLO, True) == '{"role": "user", "content": "Hi <&> é"}'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "template failed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_failures_and_escapes_become_config_errors(source, message):
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source=source).render(HELLO, True)
