//! A bench around one opener: gives inputs, keeps the last actions.
#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;

use super::{MS, REGION, config, replica};
use mirror_core::{
    Config, EngineInstance, LegId, Lineage, MetaUnreadable, OpenAction, OpenError, OpenInput, OpenParams, OpenWaits,
    Opener, OpenerParams, Options, PromoteError, RaisedInVain, ReplicaFacts, SwapId, SwapOutcome, VolumeId,
};

pub struct Bench {
    pub opener: Opener,
    pub now: u64,
    pub out: Vec<OpenAction>,
    /// Replicas say that they have a meta area.
    pub meta: bool,
    /// But not these.
    pub without_meta: Vec<&'static str>,
}

impl Bench {
    pub fn new() -> Self {
        Self::with(&[])
    }

    /// These engines, and all before each of them, are known to have ended.
    pub fn with(dead: &[&str]) -> Self {
        Self::told(dead, None)
    }

    /// Told what the last attempt left behind.
    pub fn told(dead: &[&str], in_vain: Option<RaisedInVain>) -> Self {
        let params = OpenerParams {
            volume: VolumeId::new("v").unwrap(),
            block_size: 512,
            engine_instance: EngineInstance::new("e6").unwrap(),
            lineage: Some(Lineage::new("l").unwrap()),
            local: [replica("b")].into(),
            dead_engines: dead.iter().map(|e| EngineInstance::new(e).unwrap()).collect(),
            in_vain,
            options: Options { region_blocks: REGION, ..Options::default() },
            waits: OpenWaits::default(),
        };
        let mut bench =
            Self { opener: Opener::new(params), now: 1, out: Vec::new(), meta: false, without_meta: Vec::new() };
        bench.input(OpenInput::Start);
        assert_eq!(bench.out[0], OpenAction::ReadRecord);
        bench
    }

    /// Up to the raised epoch.
    pub fn raised(record: &Config) -> Self {
        let mut bench = Self::new();
        bench.record(record.clone());
        bench.cas(SwapOutcome::Committed);
        bench
    }

    pub fn input(&mut self, input: OpenInput) {
        self.out.clear();
        self.opener.apply(self.now, input, &mut self.out);
    }

    pub fn record(&mut self, record: Config) {
        self.input(OpenInput::RecordRead { result: Ok(record) });
    }

    pub fn asked(&self) -> Option<(SwapId, Config)> {
        self.out.iter().find_map(|a| match a {
            OpenAction::DoCas { cas, next, .. } => Some((*cas, next.clone())),
            _ => None,
        })
    }

    pub fn cas(&mut self, outcome: SwapOutcome) {
        let (cas, _) = self.asked().unwrap();
        self.input(OpenInput::CasAnswer { cas, outcome });
    }

    pub fn promoted(&mut self, name: &str, result: Result<(), PromoteError>) {
        let result = result.map(|()| ReplicaFacts {
            meta: self.meta && !self.without_meta.contains(&name),
            ..ReplicaFacts::default()
        });
        self.input(OpenInput::Promoted { replica: replica(name), result });
    }

    pub fn promotes(&self) -> Vec<String> {
        self.out
            .iter()
            .filter_map(|a| match a {
                OpenAction::Promote { replica, .. } => Some(replica.to_string()),
                _ => None,
            })
            .collect()
    }

    pub fn advance(&mut self, by: u64) {
        self.now += by;
        self.input(OpenInput::Tick);
    }

    /// Connects every leg that is asked for, then returns what the core gets.
    pub fn connect(&mut self) -> OpenParams {
        self.connect_all().unwrap()
    }

    pub fn connect_all(&mut self) -> Option<OpenParams> {
        let legs: Vec<LegId> = self
            .out
            .iter()
            .filter_map(|a| match a {
                OpenAction::Connect { leg, .. } => Some(*leg),
                _ => None,
            })
            .collect();
        assert!(!legs.is_empty(), "no leg is connected: {:?}", self.out);
        for leg in legs {
            self.input(OpenInput::Connected { leg, up: true });
        }
        self.ready()
    }

    /// The promotes are over.
    pub fn goes_on(&self) -> bool {
        self.out.iter().any(|a| matches!(a, OpenAction::Connect { .. }))
    }

    /// How many meta areas are asked for.
    pub fn bits_asked(&self) -> usize {
        self.out.iter().filter(|a| matches!(a, OpenAction::ReadMeta { .. })).count()
    }

    pub fn bits(&mut self, leg: u32, result: Result<Arc<[u8]>, MetaUnreadable>) {
        self.input(OpenInput::MetaRead { leg: LegId(leg), result });
    }

    /// The meta areas of these cannot be read, however often they are promoted anew.
    pub fn unreadable(&mut self, legs: &[(u32, &str)]) {
        for attempt in 0..4 {
            if attempt > 0 {
                self.advance(250 * MS);
                let names: Vec<&str> = legs.iter().map(|(_, name)| *name).collect();
                assert_eq!(self.promotes(), names, "attempt {attempt}");
                for (leg, name) in legs {
                    self.promoted(name, Ok(()));
                    self.input(OpenInput::Connected { leg: LegId(*leg), up: true });
                    assert_eq!(self.bits_asked(), 1);
                }
            }
            legs.iter().for_each(|(leg, _)| self.bits(*leg, Err(MetaUnreadable)));
        }
    }

    pub fn ready(&self) -> Option<OpenParams> {
        self.out.iter().find_map(|a| match a {
            OpenAction::Ready(params) => Some((**params).clone()),
            _ => None,
        })
    }

    pub fn failed(&self) -> Option<OpenError> {
        self.out.iter().find_map(|a| match a {
            OpenAction::Failed { reason } => Some(reason.clone()),
            _ => None,
        })
    }
}

pub fn clean(in_sync: &[&str], rebuilding: &[&str], min: u32) -> Config {
    Config { clean: true, ..config(in_sync, rebuilding, min) }
}
