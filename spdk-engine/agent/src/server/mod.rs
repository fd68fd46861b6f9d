//! The gRPC services of `addax.engine.v1`, as the proto file describes them.
//!
//! *What it is.* Thin: requests go to [`Replicas`] and [`Engines`], answers come from them and from the [`Hub`].
//!
//! *Invariants.* The mapping of errors to gRPC codes is in `status` and nowhere else. A watcher is told the whole state,
//! then `synced`, then changes; its buffer here is [`WATCH_BUFFER`] messages, and a slow one slows only itself.
//!
//! *When things fail.* A watcher that is too far behind gets `OUT_OF_RANGE` and watches again.

mod status;

use std::pin::Pin;

use addax_proto::engine_v1 as pb;
use futures::Stream;
use pb::event::Object;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::disk::Disks;
use crate::engine::Engines;
use crate::error::AgentError;
use crate::hub::Hub;
use crate::replica::{Permit, Promotion, Replicas};
use status::to_status;

/// Messages that wait for one watcher.
const WATCH_BUFFER: usize = 64;

type Answer<T> = Result<Response<T>, Status>;

/// What the services need.
#[derive(Clone, Debug)]
pub struct Services {
    /// The disks.
    pub disks: Disks,
    /// The replicas.
    pub replicas: Replicas,
    /// The engines.
    pub engines: Engines,
    /// What is there.
    pub hub: Hub,
    /// Ends the watch streams.
    pub shutdown: CancellationToken,
}

fn answer<T>(result: Result<T, AgentError>) -> Answer<T> {
    result.map(Response::new).map_err(|error| to_status(&error))
}

#[tonic::async_trait]
impl pb::disks_server::Disks for Services {
    async fn list_disks(&self, _request: Request<pb::ListDisksRequest>) -> Answer<pb::ListDisksResponse> {
        answer(Ok(pb::ListDisksResponse { disks: self.disks.list() }))
    }

    async fn put_disk(&self, request: Request<pb::PutDiskRequest>) -> Answer<pb::Disk> {
        answer(self.disks.put(request.into_inner()).await)
    }

    async fn remove_disk(&self, request: Request<pb::RemoveDiskRequest>) -> Answer<pb::RemoveDiskResponse> {
        let removed = self.disks.remove(&request.into_inner().name).await;
        answer(removed.map(|()| pb::RemoveDiskResponse {}))
    }
}

#[tonic::async_trait]
impl pb::replicas_server::Replicas for Services {
    async fn start_replica(&self, request: Request<pb::StartReplicaRequest>) -> Answer<pb::Replica> {
        answer(self.replicas.start(request.into_inner()).await)
    }

    async fn stop_replica(&self, request: Request<pb::StopReplicaRequest>) -> Answer<pb::StopReplicaResponse> {
        let stopped = self.replicas.stop(&request.into_inner().name).await;
        answer(stopped.map(|()| pb::StopReplicaResponse {}))
    }

    async fn delete_replica(&self, request: Request<pb::DeleteReplicaRequest>) -> Answer<pb::DeleteReplicaResponse> {
        let request = request.into_inner();
        let permit = match request.record.map(Permit::parse).transpose() {
            Ok(permit) => permit,
            Err(error) => return answer(Err(error)),
        };
        let deleted = self.replicas.delete_by(&request.name, &request.disk, permit).await;
        answer(deleted.map(|()| pb::DeleteReplicaResponse {}))
    }

    async fn list_replicas(&self, _request: Request<pb::ListReplicasRequest>) -> Answer<pb::ListReplicasResponse> {
        answer(Ok(pb::ListReplicasResponse { replicas: self.replicas.list() }))
    }

    async fn promote_replica(&self, request: Request<pb::PromoteReplicaRequest>) -> Answer<pb::Replica> {
        let request = request.into_inner();
        let promotion = Promotion {
            volume: request.volume,
            epoch: request.epoch,
            instance: request.engine_instance,
            lineage: request.lineage,
            expected: request.expected_instance,
        };
        answer(self.replicas.promote(&request.name, promotion).await)
    }
}

#[tonic::async_trait]
impl pb::engines_server::Engines for Services {
    async fn start_engine(&self, request: Request<pb::StartEngineRequest>) -> Answer<pb::Engine> {
        answer(self.engines.start(request.into_inner()).await)
    }

    async fn stop_engine(&self, request: Request<pb::StopEngineRequest>) -> Answer<pb::Engine> {
        answer(self.engines.stop(&request.into_inner().volume).await)
    }

    async fn get_engine(&self, request: Request<pb::GetEngineRequest>) -> Answer<pb::Engine> {
        answer(self.engines.get(&request.into_inner().volume))
    }

    async fn list_engines(&self, _request: Request<pb::ListEnginesRequest>) -> Answer<pb::ListEnginesResponse> {
        answer(Ok(pb::ListEnginesResponse { engines: self.engines.list() }))
    }

    async fn add_replica(&self, request: Request<pb::AddReplicaRequest>) -> Answer<pb::Engine> {
        let request = request.into_inner();
        answer(self.engines.add_replica(&request.volume, request.replica).await)
    }

    async fn remove_replica(&self, request: Request<pb::RemoveReplicaRequest>) -> Answer<pb::Engine> {
        let request = request.into_inner();
        answer(self.engines.remove_replica(&request.volume, &request.replica).await)
    }

    async fn set_allowed_hosts(&self, request: Request<pb::SetAllowedHostsRequest>) -> Answer<pb::Engine> {
        let request = request.into_inner();
        answer(self.engines.set_hosts(&request.volume, request.allowed_hosts).await)
    }

    async fn recover_volume(&self, request: Request<pb::RecoverVolumeRequest>) -> Answer<pb::RecoverVolumeResponse> {
        answer(self.engines.recover(request.into_inner()).await)
    }
}

type EventStream = Pin<Box<dyn Stream<Item = Result<pb::Event, Status>> + Send>>;

#[tonic::async_trait]
impl pb::events_server::Events for Services {
    type WatchStream = EventStream;

    async fn watch(&self, _request: Request<pb::WatchRequest>) -> Answer<EventStream> {
        let (sender, receiver) = mpsc::channel(WATCH_BUFFER);
        let (hub, shutdown) = (self.hub.clone(), self.shutdown.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = sender.closed() => {}
                () = feed(hub, &sender) => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn get_info(&self, _request: Request<pb::GetInfoRequest>) -> Answer<pb::Info> {
        answer(self.hub.info().ok_or_else(|| AgentError::Unavailable("the agent is starting".to_owned())))
    }
}

/// Tells one watcher everything, until it goes.
async fn feed(hub: Hub, watcher: &mpsc::Sender<Result<pb::Event, Status>>) {
    let mut version = hub.subscribe();
    let (mut objects, mut seen) = hub.all();
    objects.push(Object::Synced(true));
    loop {
        for object in objects {
            if watcher.send(Ok(pb::Event { object: Some(object) })).await.is_err() {
                return;
            }
        }
        if version.wait_for(|version| *version > seen).await.is_err() {
            return;
        }
        (objects, seen) = match hub.after(seen) {
            Ok(changes) => changes,
            Err(behind) => {
                // The watcher may be gone as well; then nobody minds.
                let _ = watcher.send(Err(Status::out_of_range(behind.to_string()))).await;
                return;
            }
        };
    }
}
