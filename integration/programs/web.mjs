// HTTP between two Nodes, whose libuv closes descriptors by number (syscall(SYS_close, …)):
//
//   web.mjs server PORT DIR            one process
//   web.mjs cluster PORT DIR           a primary that hands connections to two workers
//   web.mjs client PORT DIR ROUNDS     connections that are kept, destroyed, and followed by files
//
// Both ends destroy connections that have been in use and open files at once, which get their numbers. What is
// written to a file must be in it, and what is read must be the file's; the other end must see its connection end, with
// the bytes that were sent and no others. The client asks the server for its count of faults, prints them and its own, and
// "ok REQUESTS" if there are none.

import cluster from 'node:cluster';
import crypto from 'node:crypto';
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';

const [role, port, dir, rounds] = process.argv.slice(2);
const sha = (bytes) => crypto.createHash('sha256').update(bytes).digest('hex');
const faults = [];
let files = 0;

function fault(text) {
  if (faults.length < 20) faults.push(`${role} ${process.pid}: ${text}`);
}

// A file that is opened the moment a connection has been closed.
function useFile(note) {
  const name = path.join(dir, `${role}.${process.pid}.${files++}`);
  const text = Buffer.from(`${note} of ${name}`.padEnd(300, '.'));
  const fd = fs.openSync(name, 'w+');
  const written = fs.writeSync(fd, text);
  const back = Buffer.alloc(400);
  const got = fs.readSync(fd, back, 0, 400, 0);
  fs.closeSync(fd);
  const kept = fs.readFileSync(name);
  fs.unlinkSync(name);
  if (written !== text.length || !kept.equals(text)) fault(`a file holds ${kept.length} bytes, not ${text.length}`);
  if (!back.subarray(0, got).equals(text)) fault(`a file gave ${got} other bytes`);
}

async function body(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return Buffer.concat(parts);
}

async function answer(request, response) {
  const url = new URL(request.url, 'http://localhost');
  const name = path.join(dir, `store.${path.basename(url.pathname)}`);
  switch (`${request.method} ${url.pathname.split('/')[1]}`) {
    case 'POST echo':
      request.pipe(response);
      break;
    case 'PUT file': {
      const bytes = await body(request);
      await fs.promises.writeFile(name, bytes);
      response.end(sha(await fs.promises.readFile(name)));
      break;
    }
    case 'GET file': {
      const { size } = await fs.promises.stat(name);
      response.setHeader('content-length', size);
      fs.createReadStream(name).pipe(response);
      break;
    }
    // Half of what was announced, then the end.
    case 'GET destroy':
      response.setHeader('content-length', 1000);
      response.write('h'.repeat(500), () => {
        request.socket.destroy();
        useFile('destroyed by the server');
      });
      break;
    case 'GET faults':
      await body(request);
      response.end(JSON.stringify(faults));
      break;
    default:
      response.statusCode = 404;
      response.end();
  }
}

function serve() {
  const server = http.createServer((request, response) => {
    answer(request, response).catch((error) => {
      fault(error.stack);
      response.destroy();
    });
  });
  server.keepAliveTimeout = 60_000;
  server.on('connection', (socket) => {
    // Connections that the other end destroys.
    socket.on('close', () => useFile('closed by the client'));
    socket.on('error', (error) => {
      if (!['ECONNRESET', 'EPIPE'].includes(error.code)) fault(`a connection: ${error.code}`);
    });
  });
  server.listen(Number(port), '127.0.0.1');
}

function ask(agent, method, where, bytes) {
  return new Promise((resolve, reject) => {
    const request = http.request({ agent, host: '127.0.0.1', port, method, path: where }, (response) => {
      response.on('error', reject);
      body(response).then((got) => resolve({ status: response.statusCode, got }), reject);
    });
    request.on('error', reject);
    request.end(bytes);
  });
}

async function converse(id) {
  let done = 0;
  const expect = async (agent, method, where, bytes, want) => {
    const { status, got } = await ask(agent, method, where, bytes);
    done++;
    if (status !== 200 || !got.equals(want)) {
      fault(`${method} ${where}: ${status}, ${got.length} bytes, not ${want.length}`);
    }
  };
  for (let round = 0; round < Number(rounds); round++) {
    // One connection a round.
    const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
    for (let i = 0; i < 8; i++) {
      const bytes = crypto.randomBytes(i % 4 === 3 ? 70_000 : 10 + 100 * i);
      await expect(agent, 'POST', '/echo', bytes, bytes);
    }
    const stored = crypto.randomBytes(200_000 + id);
    await expect(agent, 'PUT', `/file/${id}`, stored, Buffer.from(sha(stored)));
    await expect(agent, 'GET', `/file/${id}`, undefined, stored);
    if (round % 2 === 0) {
      const end = await ask(agent, 'GET', '/destroy').then(
        ({ got }) => `${got.length} bytes`,
        (error) => error.code,
      );
      if (end !== 'ECONNRESET') fault(`a destroyed connection ended with ${end}`);
    } else {
      Object.values(agent.freeSockets).flat().forEach((socket) => socket.destroy());
      useFile('destroyed by the client');
    }
    agent.destroy();
  }
  return done;
}

async function load() {
  const done = await Promise.all([0, 1, 2, 3].map(converse));
  for (let i = 0; i < 4; i++) {
    const { got } = await ask(false, 'GET', '/faults');
    faults.push(...JSON.parse(got.toString()));
  }
  console.log([...faults, `${faults.length ? 'bad' : 'ok'} ${done.reduce((a, b) => a + b)}`].join('\n'));
}

if (role === 'client') {
  await load();
} else if (role === 'cluster' && cluster.isPrimary) {
  cluster.fork();
  cluster.fork();
} else {
  serve();
}
