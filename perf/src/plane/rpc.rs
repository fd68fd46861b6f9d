//! JSON-RPC 2.0 over the Unix socket of a data plane: one call at a time, blocking.
//!
//! *Invariants.* Every call has a deadline, [`DEADLINE`]. An answer is at most [`ANSWER_BYTES_MAX`] long.
//!
//! *When things fail.* [`RpcError::Method`] is the data plane's own answer; after any other error the connection is of
//! no use any more and the outcome of the call is unknown.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest wait for the answer of a call.
pub const DEADLINE: Duration = Duration::from_secs(30);
/// Longest answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum RpcError {
    /// The socket failed or was silent until the deadline.
    #[error("{method}: {source}")]
    Io {
        /// The method called.
        method: String,
        /// What happened.
        source: io::Error,
    },
    /// What came is no answer of JSON-RPC.
    #[error("{method}: the answer is not JSON-RPC: {reason}")]
    Answer {
        /// The method called.
        method: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The data plane refused or failed.
    #[error("{method}: {code} {message}")]
    Method {
        /// The method called.
        method: String,
        /// JSON-RPC code, or a negated errno.
        code: i64,
        /// The data plane's words.
        message: String,
    },
}

/// A connection to the socket, for several calls one after another.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    next_id: u64,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens there.
    pub fn open(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        Ok(Self { stream, next_id: 1 })
    }

    /// Calls a method; null parameters are left out.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value, RpcError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = json!({"jsonrpc": "2.0", "id": id, "method": method});
        if !params.is_null() {
            request["params"] = params.clone();
        }
        let failed = |source| RpcError::Io { method: method.to_owned(), source };
        self.stream.write_all(request.to_string().as_bytes()).map_err(failed)?;
        let answer = self.answer().map_err(failed)?;
        result_of(method, answer)
    }

    /// Reads until a whole JSON value is there.
    fn answer(&mut self) -> io::Result<Value> {
        let deadline = Instant::now() + DEADLINE;
        let mut bytes = Vec::new();
        let mut chunk = vec![0; 64 << 10];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => bytes.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if let Some(value) = first_value(&bytes)? {
                return Ok(value);
            }
            if bytes.len() > ANSWER_BYTES_MAX {
                return Err(io::Error::other(format!("an answer of more than {ANSWER_BYTES_MAX} bytes")));
            }
        }
    }
}

/// The JSON value that `bytes` begin with; none when it is not complete yet.
fn first_value(bytes: &[u8]) -> io::Result<Option<Value>> {
    // A complete answer is an object: most unfinished ones are told by their last byte, without parsing.
    if !matches!(bytes.trim_ascii_end().last(), Some(b'}' | b']')) {
        return Ok(None);
    }
    match serde_json::Deserializer::from_slice(bytes).into_iter::<Value>().next() {
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err(error)) if error.is_eof() => Ok(None),
        Some(Err(error)) => Err(error.into()),
        None => Ok(None),
    }
}

fn result_of(method: &str, mut answer: Value) -> Result<Value, RpcError> {
    let method = method.to_owned();
    if let Some(error) = answer.get("error").filter(|e| !e.is_null()) {
        let code = error["code"].as_i64().unwrap_or_default();
        let message = error["message"].as_str().unwrap_or_default().to_owned();
        return Err(RpcError::Method { method, code, message });
    }
    match answer.get_mut("result") {
        Some(result) => Ok(result.take()),
        None => Err(RpcError::Answer { method, reason: format!("neither result nor error in {answer}") }),
    }
}

/// Calls one method over a connection of its own.
///
/// # Errors
/// See [`RpcError`].
pub fn call(socket: &Path, method: &str, params: &Value) -> Result<Value, RpcError> {
    let opened = Connection::open(socket).map_err(|source| RpcError::Io { method: method.to_owned(), source });
    opened?.call(method, params)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_taken_only_when_it_is_whole() {
        let whole = br#"{"id":1,"result":{"a":[1,2]}}"#;
        for cut in 0..whole.len() {
            assert_eq!(first_value(&whole[..cut]).unwrap(), None, "{cut}");
        }
        assert_eq!(first_value(whole).unwrap().unwrap()["result"]["a"][1], 2);
        assert!(first_value(b"nonsense}").is_err());
    }

    #[test]
    fn errors_keep_code_and_message() {
        let answer = json!({"id": 1, "error": {"code": -17, "message": "File exists"}});
        assert_eq!(result_of("m", answer).unwrap_err().to_string(), "m: -17 File exists");
        assert_eq!(result_of("m", json!({"id": 1, "result": null})).unwrap(), Value::Null);
        assert!(result_of("m", json!({"id": 1})).is_err());
    }

    #[test]
    fn calls_follow_each_other_on_a_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for id in 1..=2 {
                let mut bytes = [0; 4096];
                let count = stream.read(&mut bytes).unwrap();
                let request: Value = serde_json::from_slice(&bytes[..count]).unwrap();
                assert_eq!(request["id"], id);
                let answer = json!({"jsonrpc": "2.0", "id": id, "result": request["params"]}).to_string();
                let (first, second) = answer.as_bytes().split_at(10);
                stream.write_all(first).unwrap();
                stream.write_all(second).unwrap();
            }
        });
        let mut connection = Connection::open(&path).unwrap();
        for number in [1, 2] {
            assert_eq!(connection.call("echo", &json!({"n": number})).unwrap()["n"], number);
        }
        server.join().unwrap();
        assert!(matches!(connection.call("echo", &Value::Null), Err(RpcError::Io { .. })));
    }
}
