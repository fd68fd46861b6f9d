//! Random programs on a store, against a model: a vector of bytes per volume.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Step {
    Create(u64, bool),
    Write(usize, u64, u64, u8),
    Unmap(usize, u64, u64),
    Zeroes(usize, u64, u64),
    Snapshot(usize),
    Clone(usize),
    Delete(usize),
    Resize(usize, u64),
    Inflate(usize),
    Decouple(usize),
    SetParent(usize, usize),
    Rename(usize),
    Unload,
    Crash,
}

const UNIT: u64 = 512;
/// Clusters of 4 KiB, so that programs cross extent pages and fill their store.
const SMALL: u64 = 4096;

fn step() -> impl Strategy<Value = Step> {
    let lvol = 0usize..8;
    let range = (0u64..5200, 1u64..60);
    prop_oneof![
        3 => (0u64..600, any::<bool>()).prop_map(|(n, thin)| Step::Create(n, thin)),
        8 => (lvol.clone(), range.clone(), any::<u8>()).prop_map(|(l, (o, n), b)| Step::Write(l, o, n, b)),
        3 => (lvol.clone(), range.clone()).prop_map(|(l, (o, n))| Step::Unmap(l, o, n)),
        2 => (lvol.clone(), range).prop_map(|(l, (o, n))| Step::Zeroes(l, o, n)),
        4 => lvol.clone().prop_map(Step::Snapshot),
        3 => lvol.clone().prop_map(Step::Clone),
        3 => lvol.clone().prop_map(Step::Delete),
        2 => (lvol.clone(), 0u64..650).prop_map(|(l, n)| Step::Resize(l, n)),
        1 => lvol.clone().prop_map(Step::Inflate),
        1 => lvol.clone().prop_map(Step::Decouple),
        1 => (lvol.clone(), 0usize..8).prop_map(|(a, b)| Step::SetParent(a, b)),
        1 => lvol.prop_map(Step::Rename),
        1 => Just(Step::Unload),
        1 => Just(Step::Crash),
    ]
}

/// What is expected of one volume.
#[derive(Clone, Debug)]
struct Model {
    content: Vec<u8>,
    read_only: bool,
}

struct Program {
    device: Rc<MemoryDevice>,
    store: Store,
    lvols: BTreeMap<String, Model>,
    next: u32,
}

impl Program {
    fn pick(&self, n: usize) -> Option<(String, Lvol)> {
        let name = self.lvols.keys().nth(n % self.lvols.len().max(1))?.clone();
        let lvol = self.store.lvol_by_name(&name).unwrap();
        Some((name, lvol))
    }

    fn name(&mut self) -> String {
        self.next += 1;
        format!("v{:04}", self.next)
    }

    fn range(&self, name: &str, offset: u64, len: u64) -> Option<(u64, usize)> {
        let size = self.lvols[name].content.len() as u64 / UNIT;
        let offset = offset % size.max(1);
        let len = len.min(size - offset.min(size));
        (len > 0).then_some((offset * UNIT, (len * UNIT) as usize))
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::Create(clusters, thin) => self.create(clusters, thin).await,
            Step::Write(n, offset, len, byte) => {
                let Some((name, lvol)) = self.pick(n) else { return };
                let Some((at, len)) = self.range(&name, offset, len) else { return };
                self.change(&name, at, len, byte, lvol.write(at, &vec![byte; len]).await);
            }
            Step::Unmap(n, offset, len) => {
                let Some((name, lvol)) = self.pick(n) else { return };
                let Some((at, len)) = self.range(&name, offset, len * 16) else { return };
                self.change(&name, at, len, 0, lvol.unmap(at, len as u64).await);
            }
            Step::Zeroes(n, offset, len) => {
                let Some((name, lvol)) = self.pick(n) else { return };
                let Some((at, len)) = self.range(&name, offset, len * 16) else { return };
                self.change(&name, at, len, 0, lvol.write_zeroes(at, len as u64).await);
            }
            Step::Snapshot(n) => {
                let Some((name, lvol)) = self.pick(n) else { return };
                let new = self.name();
                let made = lvol.snapshot(&new, name_uuid(&new)).await;
                let model = Model { read_only: true, ..self.lvols[&name].clone() };
                self.made(new, model, made);
            }
            Step::Clone(n) => {
                let Some((name, lvol)) = self.pick(n) else { return };
                let new = self.name();
                let made = lvol.clone_to(&new, name_uuid(&new)).await;
                let model = Model { read_only: false, ..self.lvols[&name].clone() };
                self.made(new, model, made);
            }
            Step::Delete(n) => {
                let Some((name, lvol)) = self.pick(n) else { return };
                let clones = lvol.info().clones.len();
                let gone = lvol.delete().await;
                assert_eq!(gone.is_ok(), clones < 2, "{gone:?}");
                if gone.is_ok() {
                    self.lvols.remove(&name);
                }
            }
            Step::Resize(n, clusters) => {
                let Some((name, lvol)) = self.pick(n) else { return };
                if lvol.resize(clusters * SMALL).await.is_ok() {
                    self.resized(&name, &lvol, clusters).await;
                }
            }
            Step::Inflate(n) => {
                let Some((_, lvol)) = self.pick(n) else { return };
                let _ = lvol.inflate(&|_| ()).await;
            }
            Step::Decouple(n) => {
                let Some((_, lvol)) = self.pick(n) else { return };
                let _ = lvol.decouple_parent(&|_| ()).await;
            }
            Step::SetParent(a, b) => self.set_parent(a, b).await,
            Step::Rename(n) => {
                let Some((name, lvol)) = self.pick(n) else { return };
                let new = self.name();
                if lvol.rename(&new).await.is_ok() {
                    let model = self.lvols.remove(&name).unwrap();
                    self.lvols.insert(new, model);
                }
            }
            Step::Unload => {
                self.store.unload().await.unwrap();
                self.store = load(&self.device).await;
            }
            Step::Crash => {
                self.store.abandon();
                self.store = load(&self.device).await;
            }
        }
    }

    async fn create(&mut self, clusters: u64, thin: bool) {
        if self.lvols.len() > 12 {
            return;
        }
        let name = self.name();
        let options = CreateOptions {
            name: name.clone(),
            uuid: name_uuid(&name),
            size_bytes: clusters * SMALL,
            thin,
            clear_method: [ClearMethod::Default, ClearMethod::None, ClearMethod::WriteZeroes][clusters as usize % 3],
        };
        let made = self.store.create(options).await;
        self.made(name, Model { content: vec![0; (clusters * SMALL) as usize], read_only: false }, made);
    }

    fn made(&mut self, name: String, model: Model, made: Result<Lvol, Error>) {
        if let Ok(lvol) = made {
            assert_eq!(lvol.name(), name);
            self.lvols.insert(name, model);
        }
    }

    fn change(&mut self, name: &str, at: u64, len: usize, byte: u8, result: Result<(), Error>) {
        let model = self.lvols.get_mut(name).unwrap();
        match result {
            Ok(()) => {
                assert!(!model.read_only);
                model.content[at as usize..at as usize + len].fill(byte);
            }
            // What was refused for lack of space has changed nothing that is visible.
            Err(error) => assert!([1, 28].contains(&error.errno()), "{error}"),
        }
    }

    /// After a resize the model follows what is there for the part that a clone shows of its parent.
    async fn resized(&mut self, name: &str, lvol: &Lvol, clusters: u64) {
        let model = self.lvols.get_mut(name).unwrap();
        let (old, new) = (model.content.len(), (clusters * SMALL) as usize);
        model.content.resize(new, 0);
        if new > old && lvol.info().parent.is_some() {
            let tail = lvol.read(old as u64, new - old).await.unwrap();
            model.content[old..].copy_from_slice(&tail);
        }
    }

    async fn set_parent(&mut self, a: usize, b: usize) {
        let (Some((name, lvol)), Some((_, snapshot))) = (self.pick(a), self.pick(b)) else { return };
        if !lvol.info().clones.is_empty() {
            return;
        }
        if lvol.set_parent(&snapshot).await.is_ok() {
            let now = lvol.read(0, lvol.size_bytes() as usize).await.unwrap();
            self.lvols.get_mut(&name).unwrap().content = now;
        }
    }

    async fn check(&self) {
        assert_eq!(self.store.lvols().len(), self.lvols.len());
        for (name, model) in &self.lvols {
            let lvol = self.store.lvol_by_name(name).unwrap();
            let content = lvol.read(0, lvol.size_bytes() as usize).await.unwrap();
            assert!(content == model.content, "content of {name}");
            assert_eq!(lvol.info().read_only, model.read_only);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn like_the_model(steps in prop::collection::vec(step(), 1..60), kind in 0..3) {
        run(async {
            let device = match kind {
                0 => MemoryDevice::new(8 << 20),
                1 => MemoryDevice::new(8 << 20).without_unmap().with_write_cache(),
                _ => MemoryDevice::new(8 << 20).with_unmap_rubbish().with_block_size(512),
            };
            device.fill(0, 8 << 20, 0xaa);
            let device = Rc::new(device);
            let options = FormatOptions { cluster_size: SMALL as u32, md_pages_per_cluster_ratio: 5, ..format_options() };
            let store = Store::format(device.clone(), Rc::new(NoHooks), options).await.unwrap();
            let mut program = Program { device, store, lvols: BTreeMap::new(), next: 0 };
            for step in steps {
                let reopened = matches!(step, Step::Unload | Step::Crash);
                program.step(step).await;
                assert_no_leak(&program.device, &program.store).await;
                if reopened {
                    program.check().await;
                }
            }
            program.check().await;
        });
    }
}
