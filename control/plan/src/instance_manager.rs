//! InstanceManager: made by its own node's manager; its status mirrors what the agent runs.
//!
//! An engine that runs without an Engine object on this node is an old one: the volume was detached or moved while the
//! node was away. Its epoch is over, so it can acknowledge nothing; it is stopped here. Replicas without an object are
//! left alone: they hold data (consistency rule 22).

use std::collections::BTreeMap;

use addax_api::instance_manager::{Instance, InstanceKind};
use addax_api::{InstanceManager, InstanceManagerSpec, InstanceState, LABEL_NODE, NAMESPACE, name};
use jiff::Timestamp;

use crate::action::{Action, AgentCall, CallTarget, Object};
use crate::observed::{AgentView, Observed};
use crate::write;

/// What is to be done for an instance manager now.
pub fn plan(observed: &Observed, name: &str, now: Timestamp) -> Vec<Action> {
    let Some(old) = observed.instance_managers.get(name) else {
        return create(observed, name);
    };
    let node = old.spec.node_id.as_str();
    let mut new = old.clone();
    let status = new.status.get_or_insert_default();
    match observed.agent(node) {
        Some(agent) => {
            status.current_state = InstanceState::Running;
            status.address = agent.address.clone();
            status.data_plane = agent.data_plane.clone();
            status.engine_instance = agent.data_plane_instance.clone();
            status.api_version = agent.api_version;
            status.instances = instances(agent);
        }
        None => status.current_state = InstanceState::Unknown,
    }
    if node == observed.this_node.name {
        // Known without asking, and it must stand here before anybody can open the stream.
        status.address = observed.this_node.agent_address.clone();
    }
    let mut actions = write::patches(old, &new);
    actions.extend(stop_old_engines(observed, node, now));
    actions
}

fn create(observed: &Observed, name: &str) -> Vec<Action> {
    if name != observed.this_node.name {
        return Vec::new();
    }
    let spec = InstanceManagerSpec { node_id: name.to_owned(), ..InstanceManagerSpec::default() };
    let mut object = InstanceManager::new(name, spec);
    object.metadata.namespace = Some(NAMESPACE.to_owned());
    object.metadata.labels = Some([(LABEL_NODE.to_owned(), name.to_owned())].into());
    vec![Action::Create(Box::new(Object::InstanceManager(object)))]
}

fn instances(agent: &AgentView) -> BTreeMap<String, Instance> {
    let replicas = agent.replicas.iter().map(|(name, replica)| {
        let instance = Instance {
            kind: InstanceKind::Replica,
            state: replica.state,
            message: replica.message.clone(),
            id: replica.data_plane_instance.clone(),
        };
        (name.clone(), instance)
    });
    let engines = agent.engines.iter().map(|(volume, engine)| {
        let instance = Instance {
            kind: InstanceKind::Engine,
            state: engine.state,
            message: engine.message.clone(),
            id: engine.engine_instance.clone(),
        };
        (name::engine_name(volume), instance)
    });
    replicas.chain(engines).collect()
}

fn stop_old_engines(observed: &Observed, node: &str, now: Timestamp) -> Vec<Action> {
    let Some(agent) = observed.agent(node) else {
        return Vec::new();
    };
    let old = agent.engines.iter().filter(|(volume, engine)| {
        let stopped = matches!(engine.state, InstanceState::Stopped | InstanceState::Stopping);
        let wanted = observed.engine_of(volume).is_some_and(|object| object.spec.node_id == node);
        !stopped && !wanted
    });
    let stop = |volume: &String| Action::Agent {
        node: node.to_owned(),
        call: AgentCall::StopEngine { volume: volume.clone() },
    };
    old.map(|(volume, _)| match agent.failures.get(&CallTarget::Engine(volume.clone())) {
        Some(failure) if now < failure.retry_at => Action::RequeueAt(failure.retry_at),
        _ => stop(volume),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{agent, at, engine, instance_manager, node, observed};

    #[test]
    fn an_engine_whose_object_stands_elsewhere_is_stopped() {
        let seen = observed()
            .with(node("n1"))
            .with(instance_manager("n1"))
            .with(agent("n1").running_engine("v", 1, &[]).running_engine("w", 1, &[]))
            .with(engine("v").on("n1"))
            .with(engine("w").on("n2"));
        let calls: Vec<Action> =
            plan(&seen, "n1", at(0)).into_iter().filter(|action| matches!(action, Action::Agent { .. })).collect();
        let call = AgentCall::StopEngine { volume: "w".to_owned() };
        assert_eq!(calls, [Action::Agent { node: "n1".to_owned(), call }]);
    }

    #[test]
    fn a_manager_makes_its_own_and_a_silent_agent_is_unknown() {
        let seen = observed().me("n1");
        assert!(matches!(&plan(&seen, "n1", at(0))[..], [Action::Create(_)]));
        assert_eq!(plan(&seen, "n2", at(0)), []);
        let seen = seen.with(instance_manager("n1"));
        let actions = plan(&seen, "n1", at(0));
        let [Action::PatchStatus { patch, .. }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!(patch["status"]["currentState"], "unknown");
        let seen = seen.with(agent("n1"));
        let seen = seen.apply(&plan(&seen, "n1", at(0)));
        assert_eq!(plan(&seen, "n1", at(0)), []);
    }
}
