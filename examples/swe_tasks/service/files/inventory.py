"""An inventory over HTTP, kept in memory: GET /NAME, POST /NAME/AMOUNT, GET / for the sum."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Inventory(BaseHTTPRequestHandler):
    stock = json.load(open("stock.json"))

    def do_GET(self):
        name = self.path.strip("/")
        self.answer(self.stock.get(name, 0) if name else sum(self.stock.values()))

    def do_POST(self):
        name, amount = self.path.strip("/").split("/")
        self.stock[name] = self.stock.get(name, 0) + int(amount)
        self.answer(self.stock[name])

    def answer(self, number):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{number}\n".encode())

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Inventory).serve_forever()
