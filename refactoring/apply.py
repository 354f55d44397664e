import subprocess,sys,pathlib
pairs=[l.split("||") for l in open("map.txt").read().splitlines() if l.strip()]
files=[f for f in subprocess.check_output(["git","ls-files","jaxthd"],text=True).split() if f.endswith(".py")]
used=set(); long=[]
for f in files:
    p=pathlib.Path(f); s=p.read_text(); t=s
    for old,new in pairs:
        k='"""'+old
        if k in t: t=t.replace(k,'"""'+new); used.add(old)
    if t!=s:
        p.write_text(t)
        for i,l in enumerate(t.split("\n"),1):
            if len(l)>110: long.append((f,i,len(l)))
print(len(used),"of",len(pairs)); print([o for o,_ in pairs if o not in used]); print(long)
