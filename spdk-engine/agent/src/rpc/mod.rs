//! The data plane's JSON-RPC socket: the only way in which the agent drives a data plane.
//!
//! *What it is.* One connection carries many calls at a time; answers are matched by `id`, because asynchronous methods
//! answer late. [`Client`] is a cheap handle; two tasks own the two halves of the socket.
//!
//! *Invariants.* Every call has a deadline. At most [`CALLS_MAX`] calls are in flight on a connection. A client never
//! reconnects: once its connection is gone, every call fails with [`RpcError::Disconnected`] and the supervisor decides
//! what the new process is. So an answer can never come from another process than the one the caller looked at.
//!
//! *When things fail.* [`RpcError::Timeout`] and [`RpcError::Disconnected`] mean that the outcome is unknown; callers
//! read the state before they repeat anything. [`RpcError::Method`] is the data plane's own answer.

mod addax;
mod framing;
mod lvol;
mod raid;
mod spdk;

pub use addax::{
    Event, EventBatch, LegParams, MirrorConfig, MirrorLeg, MirrorParams, MirrorState, PendingSwap, PlaneInfo,
};
pub use framing::{Framer, FramingError, VALUE_BYTES_MAX};
pub use lvol::{Lvol, Lvstore, NewLvstore};
pub use raid::{RaidBdev, RaidProcess, RaidProgress};
pub use spdk::{AttachParams, Bdev, Controller, Listener, Namespace, NewSubsystem, PathUse, Subsystem};

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Calls in flight on one connection. The socket's own buffer takes 256 KiB of requests; ours are below 4 KiB.
pub const CALLS_MAX: usize = 32;
/// Deadline of calls that only read or make objects.
pub const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// Deadline of connecting to the socket.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RpcError {
    /// The socket does not take connections.
    #[error("cannot connect to the data plane's socket {path}: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The connection ended before the answer came.
    #[error("{method}: the data plane closed its socket")]
    Disconnected {
        /// The method called.
        method: String,
    },
    /// No answer in time.
    #[error("{method}: no answer from the data plane within {after:?}")]
    Timeout {
        /// The method called.
        method: String,
        /// The deadline that passed.
        after: Duration,
    },
    /// The data plane refused or failed.
    #[error("{method}: {message} (code {code})")]
    Method {
        /// The method called.
        method: String,
        /// JSON-RPC code, or a negated errno.
        code: i64,
        /// The data plane's words.
        message: String,
    },
    /// The answer has another shape than the method's.
    #[error("{method}: unexpected answer: {reason}")]
    Answer {
        /// The method called.
        method: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Codes of JSON-RPC and negated errno values that have a meaning here.
pub mod code {
    /// The method does not exist.
    pub const METHOD_NOT_FOUND: i64 = -32601;
    /// Parameters are wrong; in the nvmf family also "does not exist".
    pub const INVALID_PARAMS: i64 = -32602;
    /// `EEXIST`.
    pub const EXISTS: i64 = -17;
    /// `EINVAL`.
    pub const INVALID: i64 = -22;
    /// `ENODEV`.
    pub const NO_DEVICE: i64 = -19;
}

impl RpcError {
    /// The code of the data plane's own answer.
    pub fn code(&self) -> Option<i64> {
        match self {
            Self::Method { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the object that the call names is not there.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Method { code: code::NO_DEVICE, .. } => true,
            Self::Method { message, .. } => {
                let text = message.to_ascii_lowercase();
                text.contains("not found") || text.contains("does not exist") || text.contains("no such")
            }
            _ => false,
        }
    }
}

type Answer = Result<Value, (i64, String)>;
type Waiters = Arc<std::sync::Mutex<HashMap<u64, oneshot::Sender<Answer>>>>;

/// A handle on one connection to a data plane.
#[derive(Clone, Debug)]
pub struct Client {
    requests: mpsc::Sender<Vec<u8>>,
    waiters: Waiters,
    ids: Arc<AtomicU64>,
    permits: Arc<Semaphore>,
    closed: CancellationToken,
}

impl Client {
    /// Connects to the socket of a data plane.
    ///
    /// # Errors
    /// [`RpcError::Connect`].
    pub async fn connect(path: &Path) -> Result<Self, RpcError> {
        let error = |source| RpcError::Connect { path: path.to_owned(), source };
        let stream = tokio::time::timeout(CONNECT_DEADLINE, UnixStream::connect(path))
            .await
            .map_err(|_| error(std::io::ErrorKind::TimedOut.into()))?
            .map_err(error)?;
        Ok(Self::over(stream))
    }

    /// Speaks over a connection that is already there.
    pub fn over(stream: UnixStream) -> Self {
        let (read, write) = stream.into_split();
        let (requests, queue) = mpsc::channel(CALLS_MAX);
        let client = Self {
            requests,
            waiters: Waiters::default(),
            ids: Arc::new(AtomicU64::new(1)),
            permits: Arc::new(Semaphore::new(CALLS_MAX)),
            closed: CancellationToken::new(),
        };
        tokio::spawn(read_answers(read, client.waiters.clone(), client.closed.clone()));
        tokio::spawn(write_requests(write, queue, client.closed.clone()));
        client
    }

    /// Ends when the connection is gone.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Whether the connection is gone.
    pub fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Calls a method and waits at most `deadline` for its result. `params` of `Null` are left out.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn call(&self, method: &str, params: Value, deadline: Duration) -> Result<Value, RpcError> {
        match tokio::time::timeout(deadline, self.exchange(method, params)).await {
            Ok(result) => result,
            Err(_) => Err(RpcError::Timeout { method: method.to_owned(), after: deadline }),
        }
    }

    /// Calls a method and reads its result as a type.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub async fn call_as<T: DeserializeOwned>(
        &self,
        method: &str,
        params: Value,
        deadline: Duration,
    ) -> Result<T, RpcError> {
        let value = self.call(method, params, deadline).await?;
        serde_json::from_value(value)
            .map_err(|error| RpcError::Answer { method: method.to_owned(), reason: error.to_string() })
    }

    async fn exchange(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        let gone = || RpcError::Disconnected { method: method.to_owned() };
        let _permit = self.permits.acquire().await.map_err(|_| gone())?;
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let (answer, wait) = oneshot::channel();
        let _forget = Forget { waiters: &self.waiters, id };
        lock(&self.waiters).insert(id, answer);
        if self.is_closed() {
            return Err(gone());
        }
        self.requests.send(request(id, method, params)).await.map_err(|_| gone())?;
        match wait.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err((code, message))) => Err(RpcError::Method { method: method.to_owned(), code, message }),
            Err(_) => Err(gone()),
        }
    }
}

/// Takes a call's entry away however the call ends, so that abandoned calls leave nothing behind.
struct Forget<'a> {
    waiters: &'a Waiters,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        lock(self.waiters).remove(&self.id);
    }
}

fn lock(waiters: &Waiters) -> std::sync::MutexGuard<'_, HashMap<u64, oneshot::Sender<Answer>>> {
    // A panic while the map was held cannot leave it half changed: single inserts and removes.
    waiters.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn request(id: u64, method: &str, params: Value) -> Vec<u8> {
    let mut request = json!({"jsonrpc": "2.0", "id": id, "method": method});
    if !params.is_null() {
        request["params"] = params;
    }
    let mut bytes = request.to_string().into_bytes();
    bytes.push(b'\n');
    bytes
}

async fn write_requests(mut write: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>, closed: CancellationToken) {
    loop {
        let bytes = tokio::select! {
            () = closed.cancelled() => break,
            next = queue.recv() => match next {
                Some(bytes) => bytes,
                None => break,
            },
        };
        tokio::select! {
            () = closed.cancelled() => break,
            result = write.write_all(&bytes) => if result.is_err() { break },
        }
    }
    closed.cancel();
}

async fn read_answers(mut read: OwnedReadHalf, waiters: Waiters, closed: CancellationToken) {
    let mut framer = Framer::new();
    let mut chunk = vec![0_u8; 16 * 1024];
    loop {
        let count = tokio::select! {
            () = closed.cancelled() => break,
            result = read.read(&mut chunk) => result.unwrap_or(0),
        };
        if count == 0 {
            break;
        }
        framer.push(&chunk[..count]);
        if let Err(error) = deliver_all(&mut framer, &waiters) {
            tracing::warn!(%error, "the data plane's socket is out of step; closing it");
            break;
        }
    }
    closed.cancel();
    lock(&waiters).clear();
}

fn deliver_all(framer: &mut Framer, waiters: &Waiters) -> Result<(), FramingError> {
    while let Some(mut value) = framer.next_value()? {
        let Some(id) = value.get("id").and_then(Value::as_u64) else {
            tracing::warn!(answer = %value, "the data plane answered without an id");
            continue;
        };
        let answer = match value.get("error") {
            Some(error) => Err((
                error.get("code").and_then(Value::as_i64).unwrap_or_default(),
                error.get("message").and_then(Value::as_str).unwrap_or("no message").to_owned(),
            )),
            None => Ok(value.get_mut("result").map(Value::take).unwrap_or_default()),
        };
        // Nobody waits when the call's deadline has passed.
        if let Some(waiter) = lock(waiters).remove(&id) {
            let _ = waiter.send(answer);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
