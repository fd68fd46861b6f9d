//! The event stream of one agent: opened, followed, and opened again when it breaks.
//!
//! *Invariant.* The snapshot's view is connected exactly while a stream is open that has told everything there was.
//!
//! *When things fail.* A peer that vanishes without a word is found by the connection's own probes; opening again waits
//! longer and longer, but never longer than [`LONGEST_DELAY`], because everything on the node waits for it.

use std::sync::Arc;
use std::time::Duration;

use addax_plan::observed::AgentView;
use addax_proto::engine_v1 as pb;
use jiff::Timestamp;
use pb::events_client::EventsClient;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::view;
use crate::datastore::Datastore;

/// Delay after the first break.
const FIRST_DELAY: Duration = Duration::from_millis(50);
/// Longest delay between attempts.
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// Longest time from the call to everything being told.
const SYNC_DEADLINE: Duration = Duration::from_secs(15);

/// Follows an agent for ever; the caller drops it to end it.
pub(super) async fn follow(store: Arc<Datastore>, node: String, address: String, channel: Channel) {
    let mut failures: u32 = 0;
    loop {
        let opened = tokio::time::timeout(SYNC_DEADLINE, open(&address, channel.clone())).await;
        let end = match opened.unwrap_or_else(|_| Err(Status::deadline_exceeded("the agent does not tell its state"))) {
            Ok((view, stream)) => {
                failures = 0;
                tracing::info!(node, address, "the agent's stream is open");
                store.agent_synced(&node, view);
                let end = pass_on(&store, &node, stream).await;
                store.agent_lost(&node);
                end
            }
            Err(status) => status,
        };
        tracing::warn!(node, address, code = ?end.code(), message = end.message(), "no stream of the agent");
        let factor = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
        failures = failures.saturating_add(1);
        tokio::time::sleep(FIRST_DELAY.saturating_mul(factor).min(LONGEST_DELAY)).await;
    }
}

/// Opens the stream and takes what is there.
async fn open(address: &str, channel: Channel) -> Result<(AgentView, Streaming<pb::Event>), Status> {
    let mut stream = EventsClient::new(channel).watch(pb::WatchRequest {}).await?.into_inner();
    let mut agent = AgentView { address: address.to_owned(), ..AgentView::default() };
    loop {
        let event = stream.message().await?.ok_or_else(ended)?;
        match event.object {
            Some(pb::event::Object::Synced(_)) => return Ok((agent, stream)),
            Some(object) => {
                if let Some(change) = view::change(object, Timestamp::now()) {
                    change.apply(&mut agent);
                }
            }
            None => {}
        }
    }
}

async fn pass_on(store: &Datastore, node: &str, mut stream: Streaming<pb::Event>) -> Status {
    loop {
        match stream.message().await {
            Ok(Some(event)) => {
                let change = event.object.and_then(|object| view::change(object, Timestamp::now()));
                if let Some(change) = change {
                    store.agent_told(node, change);
                }
            }
            Ok(None) => return ended(),
            Err(status) => return status,
        }
    }
}

fn ended() -> Status {
    Status::unavailable("the agent has ended the stream")
}
