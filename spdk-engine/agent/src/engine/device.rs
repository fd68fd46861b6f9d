//! The device of a volume: the bundled data plane's mirror, or a stock one's `raid1`.
//!
//! *What it is.* One interface over both, so that the owner and the swap server do not tell them apart. What the second
//! cannot promise is in [`super::raid`].
//!
//! *When things fail.* [`AgentError`].

use std::sync::Arc;
use std::time::Duration;

use mirror_core::RecordError;

use super::Signals;
use super::build::mirror_name;
use super::raid::{self, Raid};
use crate::arbiter::{Arbiter, config_to_mirror};
use crate::error::AgentError;
use crate::rpc::{Client, LegParams, MirrorParams, MirrorState, RpcError};
use crate::state::EngineWish;
use crate::supervise::Plane;

/// A volume's device that runs; cheap to clone.
#[derive(Clone, Debug)]
pub(super) enum Device {
    Mirror { client: Client, name: String },
    Raid(Raid),
}

impl Device {
    /// Makes the device.
    pub(super) async fn create(
        plane: &Plane,
        params: &MirrorParams,
        signals: Arc<Signals>,
    ) -> Result<Self, AgentError> {
        let client = plane.client.clone();
        if plane.has_mirror() {
            client.addax_mirror_create(params).await?;
            return Ok(Self::Mirror { client, name: params.name.clone() });
        }
        Ok(Self::Raid(Raid::create(client, params, signals).await?))
    }

    /// A device that runs already, made by an earlier life of this agent.
    pub(super) async fn find(
        plane: &Plane,
        wish: &EngineWish,
        arbiter: &dyn Arbiter,
        signals: Arc<Signals>,
    ) -> Result<Option<(Self, MirrorState)>, AgentError> {
        let (client, name) = (plane.client.clone(), mirror_name(&wish.volume));
        let device = if plane.has_mirror() {
            Self::Mirror { client, name }
        } else {
            let record = match arbiter.read(&wish.volume).await {
                Ok(record) => config_to_mirror(&record),
                Err(RecordError::NotFound) => return Ok(None),
                Err(error) => return Err(AgentError::Unavailable(format!("the arbiter: {error}"))),
            };
            match Raid::adopt(client, record, &wish.volume, signals).await? {
                Some(raid) => Self::Raid(raid),
                None => return Ok(None),
            }
        };
        let found = device.get().await?;
        let mine = |state: &MirrorState| {
            let runs = state.state == "open" || state.state == "closing";
            runs && wish.instances.contains(&state.config.engine_instance)
        };
        match found.filter(mine) {
            Some(state) => Ok(Some((device, state))),
            None => {
                device.let_go();
                Ok(None)
            }
        }
    }

    /// Whether acknowledgements do not wait for the record.
    pub(super) fn is_best_effort(&self) -> bool {
        matches!(self, Self::Raid(_))
    }

    /// Ends what runs beside the device, which stays.
    pub(super) fn let_go(&self) {
        if let Self::Raid(raid) = self {
            raid.let_go();
        }
    }

    pub(super) async fn get(&self) -> Result<Option<MirrorState>, RpcError> {
        match self {
            Self::Mirror { client, name } => client.addax_mirror_get(name).await,
            Self::Raid(raid) => Ok(Some(raid.get())),
        }
    }

    pub(super) async fn add_leg(&self, leg: &LegParams) -> Result<(), RpcError> {
        match self {
            Self::Mirror { client, name } => client.addax_mirror_add_leg(name, leg).await,
            Self::Raid(raid) => {
                raid.add_leg(leg);
                Ok(())
            }
        }
    }

    /// What the next session of a leg will find (rule 1). An array loses legs for good.
    pub(super) async fn set_instance(&self, replica: &str, instance: &str) -> Result<(), RpcError> {
        match self {
            Self::Mirror { client, name } => client.addax_mirror_set_instance(name, replica, instance).await,
            Self::Raid(_) => Ok(()),
        }
    }

    /// No host is left that was attached before (rule 1).
    pub(super) async fn hosts_detached(&self) -> Result<(), RpcError> {
        match self {
            Self::Mirror { client, name } => client.addax_mirror_hosts_detached(name).await,
            Self::Raid(_) => Ok(()),
        }
    }

    pub(super) async fn remove_leg(&self, replica: &str, deadline: Duration) -> Result<(), RpcError> {
        match self {
            Self::Mirror { client, name } => client.addax_mirror_remove_leg(name, replica, deadline).await,
            Self::Raid(raid) => {
                raid.remove_leg(replica);
                Ok(())
            }
        }
    }

    pub(super) async fn swap_answer(
        &self,
        swap: u64,
        outcome: &str,
        config: Option<&crate::rpc::MirrorConfig>,
    ) -> Result<(), RpcError> {
        match self {
            Self::Mirror { client, name } => client.addax_mirror_swap_answer(name, swap, outcome, config).await,
            Self::Raid(raid) => {
                raid.swap_answer(swap, outcome);
                Ok(())
            }
        }
    }

    /// Closes in order: drains, flushes, records the clean stop.
    pub(super) async fn close(&self, client: &Client, volume: &str, deadline: Duration) -> Result<(), AgentError> {
        match self {
            Self::Mirror { client, name } => Ok(client.addax_mirror_close(name, deadline).await?),
            Self::Raid(raid) => {
                // The end of the last session is the end of the last write; the array itself cannot be told to drain.
                client.nvmf_delete_subsystem(&addax_api::nqn::volume_nqn(volume)).await?;
                raid.close(deadline).await
            }
        }
    }
}

/// Removes a volume's device, whatever state it is in.
pub(super) async fn sweep(plane: &Plane, volume: &str) -> Result<(), RpcError> {
    match plane.has_mirror() {
        true => plane.client.addax_mirror_delete(&mirror_name(volume)).await,
        false => raid::sweep(&plane.client, volume).await,
    }
}
