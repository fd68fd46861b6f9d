//! The JSON-RPC socket: framing, dispatch, answers.
//!
//! *What it is.* A Unix stream socket guarded by `<path>.lock`. A request is taken as soon as one complete JSON value
//! is there; no delimiter is needed. Handlers run as tasks on the control core, so slow ones do not hold others up;
//! answers are sent when they are ready, matched by `id`.
//!
//! *Invariants.* A request is at most [`REQUEST_BYTES_MAX`] long and nested at most [`DEPTH_MAX`] deep; at most
//! [`CONNECTIONS_MAX`] connections are open and [`IN_FLIGHT_MAX`] requests run per connection: beyond that the socket
//! is not read. Answers have the members `jsonrpc`, `id`, then `result` or `error`, and end in a newline.
//!
//! *When things fail.* Malformed JSON is answered with a parse error, then the connection is closed. A client that
//! closed its writing side still gets its answers. Source: SPDK v26.09, as its socket behaves.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::fcntl::{Flock, FlockArg};
use serde_json::{Value, json};

use super::{Methods, RpcError, RpcResult};
use crate::app::App;
use crate::reactor::net::{Listener, Piece, Stream};
use crate::reactor::{Core, OnReady, WatchId};

/// Longest request in bytes.
pub const REQUEST_BYTES_MAX: usize = 256 << 10;
/// Deepest nesting of a request.
pub const DEPTH_MAX: usize = 64;
/// Connections at the same time.
pub const CONNECTIONS_MAX: usize = 64;
/// Requests of one connection that may run at the same time.
pub const IN_FLIGHT_MAX: usize = 64;
/// Answers that may wait for a slow reader, in bytes, before its connection is closed.
pub const OUTPUT_BYTES_MAX: usize = 32 << 20;

/// A running RPC server; dropping it closes the socket and removes the file.
pub struct Server {
    inner: Rc<Inner>,
    watch: WatchId,
    path: PathBuf,
    _lock: Flock<File>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).finish()
    }
}

struct Inner {
    app: App,
    methods: Rc<Methods>,
    listener: RefCell<Box<dyn Listener>>,
    open: Rc<Cell<usize>>,
}

impl Server {
    /// Listens at `path`.
    ///
    /// # Errors
    /// When another process holds the lock, or the socket cannot be made.
    pub fn start(app: App, methods: Rc<Methods>, path: &Path) -> io::Result<Self> {
        let lock = lock_beside(path)?;
        match std::fs::symlink_metadata(path) {
            Ok(meta) if meta.file_type().is_socket() => std::fs::remove_file(path)?,
            Ok(_) => return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is no socket")),
            Err(_) => {}
        }
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let listener: Box<dyn Listener> = Box::new(listener);
        let fd = listener.raw();
        let core = app.core().clone();
        let inner = Rc::new(Inner { app, methods, listener: RefCell::new(listener), open: Rc::default() });
        let watch = core.watch(fd, Rc::clone(&inner) as Rc<dyn OnReady>);
        Ok(Self { inner, watch, path: path.to_owned(), _lock: lock })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.inner.app.core().unwatch(self.watch);
        let _ = std::fs::remove_file(&self.path);
    }
}

fn lock_beside(path: &Path) -> io::Result<Flock<File>> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&name)?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
        let text = format!("{} is in use by another process ({error})", path.display());
        io::Error::new(io::ErrorKind::AddrInUse, text)
    })
}

impl OnReady for Inner {
    fn readable(self: Rc<Self>, core: &Core) {
        loop {
            let accepted = self.listener.borrow_mut().accept();
            match accepted {
                Ok(stream) if self.open.get() < CONNECTIONS_MAX => {
                    self.open.set(self.open.get() + 1);
                    Connection::start(core, &self, stream);
                }
                Ok(_) => tracing::warn!(limit = CONNECTIONS_MAX, "RPC connection refused: too many"),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::error!(%error, "cannot accept an RPC connection");
                    return;
                }
            }
        }
    }

    fn writable(self: Rc<Self>, _core: &Core) {}
}

struct Connection {
    app: App,
    methods: Rc<Methods>,
    stream: RefCell<Box<dyn Stream>>,
    watch: Cell<Option<WatchId>>,
    input: RefCell<Vec<u8>>,
    output: RefCell<VecDeque<u8>>,
    in_flight: Cell<usize>,
    /// The peer has ended its side, or sent something malformed: answer what runs, then close.
    finishing: Cell<bool>,
    open: Rc<Cell<usize>>,
}

impl Connection {
    fn start(core: &Core, server: &Inner, stream: Box<dyn Stream>) {
        let fd = stream.raw();
        let connection = Rc::new(Self {
            app: server.app.clone(),
            methods: Rc::clone(&server.methods),
            stream: RefCell::new(stream),
            watch: Cell::new(None),
            input: RefCell::default(),
            output: RefCell::default(),
            in_flight: Cell::new(0),
            finishing: Cell::new(false),
            open: Rc::clone(&server.open),
        });
        let watch = core.watch(fd, Rc::clone(&connection) as Rc<dyn OnReady>);
        connection.watch.set(Some(watch));
    }

    fn close(&self) {
        if let Some(watch) = self.watch.take() {
            self.app.core().unwatch(watch);
            self.open.set(self.open.get() - 1);
        }
    }

    fn fill(&self) -> bool {
        let mut chunk = [0u8; 16 << 10];
        while self.input.borrow().len() <= REQUEST_BYTES_MAX {
            let got = self.stream.borrow_mut().recv(&mut chunk);
            match got {
                Ok(0) => {
                    self.finishing.set(true);
                    return true;
                }
                Ok(n) => self.input.borrow_mut().extend_from_slice(&chunk[..n]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            }
        }
        true
    }

    fn take_requests(self: &Rc<Self>) {
        while self.in_flight.get() < IN_FLIGHT_MAX {
            let taken = next_value(&self.input.borrow());
            match taken {
                Ok(Some((value, used))) => {
                    self.input.borrow_mut().drain(..used);
                    self.dispatch(value);
                }
                Ok(None) if self.input.borrow().len() <= REQUEST_BYTES_MAX => return,
                Ok(None) | Err(()) => {
                    self.input.borrow_mut().clear();
                    self.finishing.set(true);
                    return self.answer(&error_answer(&Value::Null, &RpcError::new(RpcError::PARSE, "Parse error")));
                }
            }
        }
    }

    fn dispatch(self: &Rc<Self>, request: Value) {
        self.in_flight.set(self.in_flight.get() + 1);
        let connection = Rc::clone(self);
        self.app.core().spawn(async move {
            let answer = handle(&connection.app, &connection.methods, request).await;
            connection.in_flight.set(connection.in_flight.get() - 1);
            if let Some(answer) = answer {
                connection.answer(&answer);
            }
            connection.advance();
        });
    }

    fn answer(&self, answer: &Value) {
        if self.watch.get().is_none() {
            return;
        }
        let mut output = self.output.borrow_mut();
        output.extend(answer.to_string().as_bytes());
        output.push_back(b'\n');
        drop(output);
        self.flush();
    }

    fn flush(&self) {
        loop {
            let mut output = self.output.borrow_mut();
            if output.is_empty() {
                return;
            }
            let sent = self.stream.borrow_mut().send(&[Piece::Bytes(output.make_contiguous())]);
            match sent {
                Ok(n) => drop(output.drain(..n)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && output.len() <= OUTPUT_BYTES_MAX => {
                    if let Some(watch) = self.watch.get() {
                        self.app.core().want_write(watch);
                    }
                    return;
                }
                Err(_) => {
                    output.clear();
                    drop(output);
                    return self.close();
                }
            }
        }
    }

    /// Goes on after any change: takes further requests, or closes when everything asked was answered.
    fn advance(self: &Rc<Self>) {
        if self.watch.get().is_none() {
            return;
        }
        self.take_requests();
        if self.finishing.get() && self.in_flight.get() == 0 && self.output.borrow().is_empty() {
            self.close();
        }
    }
}

impl OnReady for Connection {
    fn readable(self: Rc<Self>, _core: &Core) {
        if self.finishing.get() || self.fill() {
            self.advance();
        } else {
            self.close();
        }
    }

    fn writable(self: Rc<Self>, _core: &Core) {
        self.flush();
        self.advance();
    }
}

/// The first complete JSON value of `bytes` and how many bytes it took; `None` when more are needed.
fn next_value(bytes: &[u8]) -> Result<Option<(Value, usize)>, ()> {
    let skipped = bytes.iter().take_while(|b| b.is_ascii_whitespace()).count();
    let rest = &bytes[skipped..];
    if rest.is_empty() {
        return Ok(None);
    }
    // Requests are objects or arrays; anything else cannot be told from its own beginning.
    if !matches!(rest[0], b'{' | b'[') {
        return Err(());
    }
    let mut stream = serde_json::Deserializer::from_slice(rest).into_iter::<Strict>();
    match stream.next() {
        Some(Ok(Strict(value))) if depth(&value) <= DEPTH_MAX => Ok(Some((value, skipped + stream.byte_offset()))),
        Some(Err(error)) if error.is_eof() => Ok(None),
        None => Ok(None),
        Some(_) => Err(()),
    }
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// A JSON value whose objects name no member twice.
struct Strict(Value);

impl<'de> serde::Deserialize<'de> for Strict {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> serde::de::Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::from(v))
    }
    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::from(v))
    }
    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Value::from(v))
    }
    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::from(v))
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Strict(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }
    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut members = serde_json::Map::new();
        while let Some((name, Strict(value))) = map.next_entry::<String, Strict>()? {
            if let Some(earlier) = members.insert(name.clone(), value) {
                // Kept aside so that decoding the parameters fails, not the connection.
                members.insert(format!("{name} (again)"), earlier);
            }
        }
        Ok(Value::Object(members))
    }
}

fn error_answer(id: &Value, error: &RpcError) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "error": { "code": error.code, "message": error.message } })
}

/// Answers one request or batch; none when nothing is to be sent.
async fn handle(app: &App, methods: &Rc<Methods>, request: Value) -> Option<Value> {
    let Value::Array(batch) = request else { return handle_one(app, methods, request).await };
    if batch.is_empty() {
        return Some(error_answer(&Value::Null, &RpcError::new(RpcError::INVALID_REQUEST, "Invalid request")));
    }
    let mut running: futures::stream::FuturesUnordered<_> =
        batch.into_iter().map(|one| handle_one(app, methods, one)).collect();
    let mut answers = Vec::new();
    while let Some(answer) = futures::StreamExt::next(&mut running).await {
        answers.extend(answer);
    }
    (!answers.is_empty()).then_some(Value::Array(answers))
}

async fn handle_one(app: &App, methods: &Rc<Methods>, request: Value) -> Option<Value> {
    let invalid = || RpcError::new(RpcError::INVALID_REQUEST, "Invalid request");
    let Value::Object(mut request) = request else { return Some(error_answer(&Value::Null, &invalid())) };
    let id = request.remove("id").unwrap_or(Value::Null);
    let method = request.remove("method");
    let params = request.remove("params").filter(|p| !p.is_null());
    let version = request.remove("jsonrpc");
    let well_formed = matches!(id, Value::String(_) | Value::Number(_) | Value::Null)
        && version.is_none_or(|v| v == "2.0")
        && params.as_ref().is_none_or(|p| p.is_object() || p.is_array())
        && request.is_empty();
    let (true, Some(Value::String(method))) = (well_formed, method) else {
        return Some(error_answer(&id, &invalid()));
    };
    match call(app, methods, &method, params).await {
        Ok(_) if id.is_null() => None,
        Ok(result) => Some(json!({ "jsonrpc": "2.0", "id": id, "result": result })),
        Err(error) => Some(error_answer(&id, &error)),
    }
}

/// Calls a method by name, checking the phase.
pub async fn call(app: &App, methods: &Rc<Methods>, name: &str, params: Option<Value>) -> RpcResult {
    let Some(method) = methods.table.get(name) else {
        return Err(RpcError::new(RpcError::METHOD_NOT_FOUND, "Method not found"));
    };
    if !method.when.allows(app.phase()) {
        let text = match method.when {
            super::When::Startup => {
                "Method may only be called before framework is initialized. Use --wait-for-rpc command line \
                 parameter and then issue this RPC before the framework_start_init RPC."
            }
            _ => "Method may only be called after framework is initialized using framework_start_init RPC.",
        };
        return Err(RpcError::new(RpcError::WRONG_PHASE, text));
    }
    (method.handler)(app.clone(), params).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_taken_as_soon_as_they_are_complete() {
        let text = br#" {"a":1}{"b":[2]} [3"#;
        let (first, used) = next_value(text).unwrap().unwrap();
        assert_eq!(first, json!({"a":1}));
        let (second, more) = next_value(&text[used..]).unwrap().unwrap();
        assert_eq!(second, json!({"b":[2]}));
        assert_eq!(next_value(&text[used + more..]), Ok(None));
    }

    #[test]
    fn malformed_text_is_told_from_incomplete_text() {
        assert_eq!(next_value(b"{\"a\":"), Ok(None));
        assert_eq!(next_value(b"{]"), Err(()));
        assert_eq!(next_value(b"x"), Err(()));
        let deep = [vec![b'['; 100], vec![b']'; 100]].concat();
        assert_eq!(next_value(&deep), Err(()));
    }

    #[test]
    fn a_member_named_twice_makes_decoding_fail() {
        let (value, _) = next_value(br#"{"name":"a","name":"b"}"#).unwrap().unwrap();
        assert_eq!(value.as_object().map(serde_json::Map::len), Some(2));
    }
}
