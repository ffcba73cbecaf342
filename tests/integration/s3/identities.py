"""Temporary credentials of a real MinIO, and stand-ins for the services that hand such out: STS with a web identity, a
container's endpoint, an instance's metadata. Those three cannot be had outside of AWS; what they hand out here is real."""

import hashlib
import hmac
import http.client
import http.server
import re
import ssl
import threading
import time
import urllib.parse

from servers import ACCESS_KEY, SECRET_KEY


def _sign(key, text):
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def signed_post(server, form, service="sts", region="us-east-1"):
    """A form, signed by AWS's rules with the server's root keys: (status, text)."""
    body = urllib.parse.urlencode(form)
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    payload = hashlib.sha256(body.encode()).hexdigest()
    host = f"127.0.0.1:{server.port}"
    canonical = f"POST\n/\n\nhost:{host}\nx-amz-content-sha256:{payload}\nx-amz-date:{date}\n\n" \
                f"host;x-amz-content-sha256;x-amz-date\n{payload}"
    scope = f"{date[:8]}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = ("AWS4" + SECRET_KEY).encode()
    for part in date[:8], region, service, "aws4_request":
        key = _sign(key, part)
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    if server.certificates:
        context = ssl.create_default_context(cafile=server.certificates.ca)
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/", body, {
        "Host": host, "X-Amz-Date": date, "X-Amz-Content-Sha256": payload,
        "Content-Type": "application/x-www-form-urlencoded",
        "Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, "
                         f"SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature={signature}"})
    answer = connection.getresponse()
    data = answer.read().decode()
    connection.close()
    return answer.status, data


ASSUME_ROLE = {"Action": "AssumeRole", "Version": "2011-06-15", "DurationSeconds": "3600"}


def sts_is_up(server):
    """MinIO serves objects before it knows its users."""
    return "Server not initialized" not in signed_post(server, ASSUME_ROLE)[1]


def assume_role(server, policy=None):
    """Temporary credentials of MinIO's root: (access key, secret key, session token)."""
    status, text = signed_post(server, {**ASSUME_ROLE, "Policy": policy} if policy else ASSUME_ROLE)
    assert status == 200, (status, text)
    return tuple(re.search(f"<{n}>(.*?)</{n}>", text).group(1) for n in ("AccessKeyId", "SecretAccessKey", "SessionToken"))


def in_seconds(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


class Identities:
    """All three services on one port. `keys` are what is handed out, `lifetime_s` for how long; `status` other than
    200 and `code` make a refusal of it; `requests` lists what came."""

    def __init__(self, keys):
        self.keys = keys
        self.lifetime_s = 3600
        self.status, self.code = 200, ""
        self.token = "token-1"  # the web identity, or the container's authorization, that is good now
        self.role = "train+er"
        self.requests = []
        me = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status, text):
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def serve(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
                me.requests.append(f"{self.command} {self.path}")
                if me.status != 200:
                    self.answer(me.status, f"<ErrorResponse><Error><Code>{me.code}</Code></Error></ErrorResponse>")
                else:
                    self.answer(*me.answer_to(self.command, self.path, self.headers, body))

            do_GET = do_PUT = do_POST = serve

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def json(self, **more):
        fields = {"AccessKeyId": self.keys[0], "SecretAccessKey": self.keys[1], "Token": self.keys[2],
                  "Expiration": in_seconds(self.lifetime_s), **more}
        return "{" + ", ".join(f'"{n}": "{v}"' for n, v in fields.items()) + "}"

    def answer_to(self, method, path, headers, body):
        if method == "POST" and path == "/":
            form = urllib.parse.parse_qs(body, strict_parsing=True)
            if form["Action"] != ["AssumeRoleWithWebIdentity"] or form["Version"] != ["2011-06-15"] or \
                    form["RoleArn"] != ["arn:aws:iam::1:role/train"] or not form["RoleSessionName"]:
                return 400, "<ErrorResponse><Error><Code>ValidationError</Code></Error></ErrorResponse>"
            if form["WebIdentityToken"] != [self.token]:
                return 400, "<ErrorResponse><Error><Code>ExpiredTokenException</Code></Error></ErrorResponse>"
            return 200, "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">" \
                "<AssumeRoleWithWebIdentityResult><Credentials>" \
                f"<AccessKeyId>{self.keys[0]}</AccessKeyId><SecretAccessKey>{self.keys[1]}</SecretAccessKey>" \
                f"<SessionToken>{self.keys[2]}</SessionToken><Expiration>{in_seconds(self.lifetime_s)}</Expiration>" \
                "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        if method == "GET" and path == "/container?id=1":
            return (200, self.json(RoleArn="x")) if headers.get("authorization") == self.token else (401, "")
        if method == "PUT" and path == "/latest/api/token" and self.role is None:
            return 403, ""  # switched off
        if method == "PUT" and path == "/latest/api/token":
            return (200, "imds-token") if headers.get("x-aws-ec2-metadata-token-ttl-seconds") == "21600" else (400, "")
        if headers.get("x-aws-ec2-metadata-token") != "imds-token":
            return 401, ""
        base = "/latest/meta-data/iam/security-credentials/"
        if path == base:
            return (200, self.role + "\n") if self.role else (404, "")
        if path == base + urllib.parse.quote(self.role, safe=""):
            return 200, self.json(Code="Success", Type="AWS-HMAC")
        return 404, ""

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
