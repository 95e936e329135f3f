"""An HTTP/1.1 server that answers a PUT with the sha256 of its body: http_put.py PORT"""
import hashlib
import http.server
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        digest, left = hashlib.sha256(), int(self.headers["Content-Length"])
        while left:
            data = self.rfile.read(min(left, 1 << 16))
            if not data:
                return self.send_error(400)
            digest.update(data)
            left -= len(data)
        answer = digest.hexdigest().encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
