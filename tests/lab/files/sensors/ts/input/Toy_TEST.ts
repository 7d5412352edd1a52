#A toy
@problemName Toy
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false
@classLabel true up down
@data
-0.652,1.664,-1.641,-0.623,-1.608,0.235,0.317,-1.493,-1.916:-0.175,0.659,-0.005,0.149,0.242,1.576,0.511,2.253,1.102:up
-0.802,-0.248,1.136,-0.553,0.749,0.273:-1.324,0.42,0.11,-0.785,1.635,-1.233:down
