"""compare.py A B: numbers of metrics.jsonl that differ, but for times."""
import json,sys,pathlib
a,b=map(pathlib.Path,sys.argv[1:3]); bad=0
SKIP=("second","time","per_s","memory","goodput","utilization","mfu","waited","loader","busy","compile","wall","flops","fraction_of","idle","queue","speed","real_time")
for f in sorted(a.glob("*.jsonl")):
    g=b/f.name
    if not g.exists(): print(f.name,"MISSING"); bad+=1; continue
    A=[json.loads(l) for l in f.open()]; B=[json.loads(l) for l in g.open()]
    if len(A)!=len(B): print(f.name,"lines",len(A),len(B)); bad+=1
    n=0; diffs=set()
    for x,y in zip(A,B):
        for k in sorted(set(x)|set(y)):
            if any(s in k for s in SKIP): continue
            n+=1
            if x.get(k)!=y.get(k): diffs.add((k,x.get("step"),str(x.get(k))[:24],str(y.get(k))[:24]))
    print(f.name,len(A),"lines",n,"numbers",len(diffs),"differ",sorted(diffs,key=str)[:6]); bad+=bool(diffs)
sys.exit(bool(bad))
