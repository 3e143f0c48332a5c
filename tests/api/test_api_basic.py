from conftest import MODEL, RunningServer
from fake_engine import answer

def test_smoke(server: RunningServer) -> None:
    sdk = server.sdk
    r = sdk.chat.completions.create(model=MODEL, messages=[{"role":"user","content":"hello there"}], max_tokens=7, n=2)
    print(r)
    assert [c.message.content for c in r.choices] == [answer("hello there", i, 7) for i in range(2)]
    text = {0:"",1:""}
    for chunk in sdk.chat.completions.create(model=MODEL, messages=[{"role":"user","content":"hello there"}], max_tokens=7, n=2, stream=True, stream_options={"include_usage":True}):
        print(chunk)
        for c in chunk.choices: text[c.index]+=c.delta.content or ""
    assert [text[0],text[1]] == [c.message.content for c in r.choices]
    print(server.post("/generate", json={"prompt":"abc def","max_tokens":3}).text)
    print(server.post("/generate", json={"prompt":"abc def","max_tokens":3,"stream":True}).text)
    print(server.post("/v1/completions", json={"prompt":["abc def","x"],"max_tokens":3,"stream":True,"echo":True}).text)
    for p in ("/server_info","/health","/version","/v1/models","/v1/models/test-model","/v1/models/x/y","/nope"):
        x=server.get(p); print(x.status_code,x.text,x.headers)
    x=server.get("/generate"); print(x.status_code,x.text,x.headers)
    server.assert_idle()
    assert 0
