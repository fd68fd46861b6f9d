//! The server: opens the store, seeds it, collects garbage and serves a socket.
//!
//! *When things fail.* A start that fails leaves nothing running. [`Server::shutdown`] ends watches, lets requests in
//! flight finish for [`DRAIN`], and closes the store last, so that every answered write is on disk.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use axum::http::Request;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinHandle,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service;

use crate::{
    clock::Clock,
    fault::FaultHook,
    gc,
    http::{ApiService, Client, Limits},
    registry::{Registry, RegistryError},
    rest::Api,
    store::{Store, StoreError, StoreOptions},
    tls::{TlsConfig, TlsError, server_config},
};

/// Most connections at once.
const CONNECTIONS_MAX: usize = 1024;
/// Longest time for a client to finish the TLS handshake, and between pings of HTTP/2.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time for a client to send the header of its first or next request over HTTP/1. Longer than the 90 s after
/// which clients usually drop idle connections, so that no request meets a connection that is just being closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time that requests in flight get at shutdown.
const DRAIN: Duration = Duration::from_secs(5);

/// What to serve and where.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Address to listen on; port 0 for any free one.
    pub listen: SocketAddr,
    /// The data file; `None` keeps everything in memory.
    pub data_file: Option<PathBuf>,
    /// TLS; `None` serves plain HTTP.
    pub tls: Option<TlsConfig>,
    /// The kinds to serve beside the built-in ones.
    pub crds: Vec<CustomResourceDefinition>,
    /// The date.
    pub clock: Clock,
    /// Faults to inject.
    pub faults: FaultHook,
    /// Limits of requests.
    pub limits: Limits,
    /// Limits of the store.
    pub store: StoreOptions,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            data_file: None,
            tls: None,
            crds: Vec::new(),
            clock: Clock::system(),
            faults: FaultHook::none(),
            limits: Limits::default(),
            store: StoreOptions::default(),
        }
    }
}

/// A start that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The store cannot be opened or seeded.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The kinds cannot be served.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A running API without a socket, for clients in the same process.
#[derive(Debug)]
pub struct Embedded {
    service: ApiService,
    api: Api,
    shutdown: CancellationToken,
    collector: JoinHandle<()>,
}

impl Embedded {
    /// Opens the store and starts the garbage collector.
    ///
    /// # Errors
    /// See [`ServerError`]; `listen` and `tls` are not looked at.
    pub async fn start(config: &ServerConfig) -> Result<Self, ServerError> {
        let registry = Arc::new(Registry::new(&config.crds)?);
        let store = Arc::new(match &config.data_file {
            Some(path) => Store::open(path, config.store.clone())?,
            None => Store::in_memory(config.store.clone()),
        });
        let api = Api { registry, store, clock: config.clock.clone() };
        api.seed().await?;
        let shutdown = CancellationToken::new();
        let collector = tokio::spawn(gc::run(api.clone(), shutdown.clone()));
        let service = ApiService::new(api.clone(), config.limits.clone(), config.faults.clone(), shutdown.clone());
        Ok(Self { service, api, shutdown, collector })
    }

    /// The service, for `kube::Client::new(service, namespace)` and the like.
    pub fn service(&self) -> ApiService {
        self.service.clone()
    }

    /// The API without HTTP.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Ends watches and the collector, and closes the store.
    pub async fn shutdown(self) {
        self.shutdown.cancel();
        // The collector ends at its next wait; a panic in it was reported already.
        let _ = self.collector.await;
        let store = self.api.store.clone();
        // Closing waits for the last sync.
        let _ = tokio::task::spawn_blocking(move || store.close()).await;
    }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    embedded: Embedded,
    address: SocketAddr,
    acceptor: JoinHandle<()>,
    connections: TaskTracker,
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub async fn start(config: ServerConfig) -> Result<Self, ServerError> {
        let tls = config.tls.as_ref().map(server_config).transpose()?.map(TlsAcceptor::from);
        let listen = |source| ServerError::Listen { address: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let embedded = Embedded::start(&config).await?;
        let connections = TaskTracker::new();
        let acceptor = Acceptor {
            tls,
            service: embedded.service(),
            shutdown: embedded.shutdown.clone(),
            connections: connections.clone(),
            free: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        };
        let acceptor = tokio::spawn(acceptor.accept(listener));
        tracing::info!(%address, "API server listens");
        Ok(Self { embedded, address, acceptor, connections })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The API without HTTP.
    pub fn api(&self) -> &Api {
        self.embedded.api()
    }

    /// The service, for clients in the same process.
    pub fn service(&self) -> ApiService {
        self.embedded.service()
    }

    /// Stops listening, ends watches, lets requests finish, closes the store.
    pub async fn shutdown(self) {
        self.embedded.shutdown.cancel();
        let _ = self.acceptor.await;
        self.connections.close();
        if timeout(DRAIN, self.connections.wait()).await.is_err() {
            tracing::warn!(connections = self.connections.len(), "leaving connections that do not end");
        }
        self.embedded.shutdown().await;
    }
}

/// Accepts connections and serves each in a task.
#[derive(Clone)]
struct Acceptor {
    tls: Option<TlsAcceptor>,
    service: ApiService,
    shutdown: CancellationToken,
    connections: TaskTracker,
    free: Arc<Semaphore>,
}

impl Acceptor {
    async fn accept(self, listener: TcpListener) {
        loop {
            let Ok(permit) = self.free.clone().acquire_owned().await else { return };
            let accepted = tokio::select! {
                () = self.shutdown.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors and the like: wait instead of spinning.
                    tracing::warn!(%error, "accepting a connection failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let acceptor = self.clone();
            self.connections.spawn(async move {
                if let Err(error) = acceptor.connection(stream, peer).await {
                    tracing::debug!(%error, %peer, "connection");
                }
                drop(permit);
            });
        }
    }

    async fn connection(&self, stream: TcpStream, peer: SocketAddr) -> Result<(), hyper_util_error::Error> {
        stream.set_nodelay(true)?;
        let client = Client(peer.ip().to_string());
        let Some(tls) = &self.tls else { return self.serve(stream, client).await };
        let stream = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await??;
        // A client with a certificate is known by it, wherever it comes from.
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let client = certificate.map_or(client, |certificate| Client(fingerprint(certificate)));
        self.serve(stream, client).await
    }

    async fn serve(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        client: Client,
    ) -> Result<(), hyper_util_error::Error> {
        let service = self.service.clone();
        let service = hyper::service::service_fn(move |mut request: Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(client.clone());
            service.clone().call(request)
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT);
        builder.http2().timer(TokioTimer::new()).keep_alive_interval(Some(HANDSHAKE_TIMEOUT));
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            result = connection.as_mut() => return result,
            () = self.shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        connection.await
    }
}

/// A client's certificate in short.
fn fingerprint(certificate: &[u8]) -> String {
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, certificate);
    format!("certificate-{sum:016x}")
}

/// The error type of connections.
mod hyper_util_error {
    pub(super) type Error = Box<dyn std::error::Error + Send + Sync>;
}
